"""Collating: ids stay behind, the prompt's padding is cut, nothing else changes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vlatune.batch import ACTION, STATE, TOKEN_MASK, TOKENS, Columns
from vlatune.pipeline.transforms import PROMPT_MULTIPLE, cut_prompts
from vlatune.train.worker.transfer import collate


def prompts(*lengths: int, width: int = 20) -> Columns:
    mask_BL = np.arange(width) < np.array(lengths)[:, None]
    return {TOKENS: np.where(mask_BL, np.arange(1, width + 1), 0), TOKEN_MASK: mask_BL}


@pytest.mark.parametrize(
    ("lengths", "kept"), [((3, 5), 8), ((8, 1), 8), ((9, 1), 16), ((17,), 20), ((20, 2), 20), ((0, 0), 8)]
)
def test_prompts_are_cut_to_the_longest_rounded_up(lengths, kept):
    columns = prompts(*lengths)
    cut = cut_prompts(columns)
    assert cut[TOKENS].shape == cut[TOKEN_MASK].shape == (len(lengths), kept)
    assert np.array_equal(cut[TOKENS], columns[TOKENS][:, :kept])


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(50, 60), st.booleans())
def test_no_token_is_lost_and_less_than_a_multiple_of_padding_stays(lengths, width, from_the_right):
    columns = prompts(*lengths, width=width)
    if from_the_right:  # padded on the left: the last column is used, so that nothing may be cut
        columns = {key: values[:, ::-1] for key, values in columns.items()}
    cut = cut_prompts(columns)
    assert cut[TOKEN_MASK].sum() == columns[TOKEN_MASK].sum()
    spare = cut[TOKENS].shape[1] - max(1, *(int(row.nonzero()[0][-1]) + 1 for row in cut[TOKEN_MASK] if row.any()), 0)
    assert 0 <= spare < PROMPT_MULTIPLE


def test_ids_stay_on_the_host_and_other_columns_are_not_copied():
    columns: Columns = {
        "dataset_index": np.array([0, 1]),
        "index": np.array([7, 3]),
        "episode_index": np.array([0, 0]),
        "frame_index": np.array([7, 3]),
        "slot": np.array([4, 5]),
        ACTION: np.arange(12, dtype=np.float32).reshape(2, 3, 2),
        **prompts(2, 4),
    }
    batch = collate(columns)
    assert batch.samples.tolist() == [[0, 7], [1, 3]]
    assert set(batch.columns) == {ACTION, TOKENS, TOKEN_MASK}
    wrapped = batch.wrapped()
    assert wrapped.tensors[ACTION].data_ptr() == columns[ACTION].ctypes.data
    assert wrapped.tensors[TOKENS].is_contiguous()
    assert torch.equal(wrapped.tensors[TOKENS], torch.from_numpy(columns[TOKENS][:, :8].copy()))


def test_a_policy_without_prompts():
    columns = {"dataset_index": np.array([0]), "index": np.array([1]), STATE: np.zeros((1, 2), np.float32)}
    assert set(collate(columns).columns) == {STATE}
