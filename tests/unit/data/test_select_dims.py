"""--dataset.select_dims: named dims, rejected lists, and the rows, statistics and names of the selected dims."""

import json
import re
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from wide_dataset import DIMS, NAMES, make_wide

import vlatune
from vlatune.batch import ACTION, STATE
from vlatune.config.flags import config_from_dict, flags_of, parse_flags
from vlatune.config.settings import RunConfig, to_json
from vlatune.data.features import SELECT_DIMS, with_dims
from vlatune.data.health.bad_episodes import check_data_file
from vlatune.data.meta.dataset_meta import load_meta
from vlatune.data.meta.meta_info import flat_names
from vlatune.data.meta.stats import measure, read_parts
from vlatune.data.reader import make_unit, read_unit, read_units
from vlatune.policies.base import PolicySpec
from vlatune.policies.binding import bind
from vlatune.run_setup import read_specs

CHOSEN = {ACTION: ["right_gripper", 3, "7:10"], STATE: ["left_arm_0", "20:24"]}
INDICES = {ACTION: [33, 3, 7, 8, 9], STATE: [0, 20, 21, 22, 23]}
FLAG = f"{SELECT_DIMS}={json.dumps(CHOSEN)}"
SPEC = PolicySpec(
    type="pi05",
    folder="base",
    cameras=("observation.images.top",),
    image_hw=(64, 64),
    action_offsets=tuple(range(4)),
    max_state_dim=32,
    max_action_dim=32,
    normalisation={"STATE": "QUANTILES", "ACTION": "QUANTILES"},
)


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    return make_wide(tmp_path_factory.mktemp("data") / "wide")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory):
    return make_wide(tmp_path_factory.mktemp("data") / "cut", cut=INDICES)


def selected(folder, dims=CHOSEN):
    return with_dims([load_meta(str(folder))], [dims], SELECT_DIMS)[0]


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"acton": [0]}, "has no feature 'acton'; did you mean action?"),
        ({ACTION: ["right_griper"]}, "'action' has no dim 'right_griper'; did you mean right_gripper?"),
        ({ACTION: [34]}, "'34' is out of range; it has 34 dims: indices are 0 to 33"),
        ({ACTION: ["30:35"]}, "'30:35' is out of range"),
        ({ACTION: ["5:5"]}, "'5:5' is out of range"),
        ({ACTION: ["-1"]}, "'action' has no dim '-1'"),
        ({ACTION: ["left_arm_3", 3]}, "dim 3 ('left_arm_3') is selected twice"),
        ({ACTION: ["0:3", 2]}, "dim 2 ('left_arm_2') is selected twice"),
        ({ACTION: []}, "the list of dims is empty"),
        (
            {"observation.images.top": [0]},
            "'observation.images.top' is video of shape (64, 64, 3); dims are selected of a vector",
        ),
        ({"timestamp": [0]}, "'timestamp' is float32 of shape (1,); dims are selected of a vector"),
    ],
)
def test_invalid_dims_are_rejected(wide, dims, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        selected(wide, dims)
    assert str(caught.value).startswith(f"{SELECT_DIMS}: dataset '{wide}'")


def test_names_that_are_numbers_are_not_used_as_indices(tmp_path):
    folder = make_wide(tmp_path / "numbered", names=[str(dim + 1) for dim in range(DIMS)])
    with pytest.raises(ValueError, match=r"'3' is the name of dim 2, and an index; .* such as 2:3"):
        selected(folder, {ACTION: ["3"]})
    assert selected(folder, {ACTION: ["2:3"]}).features[ACTION].names == ("3",)


def test_the_flag_is_kept_as_given_and_read_back():
    config = parse_flags([FLAG, "--dataset.root=a"], RunConfig)
    assert config.dataset.select_dims == ({ACTION: ("right_gripper", "3", "7:10"), STATE: ("left_arm_0", "20:24")},)
    assert parse_flags(flags_of(config), RunConfig) == config
    assert config_from_dict(RunConfig, to_json(config), "config.json") == config
    from_json = config_from_dict(RunConfig, {"dataset": {"select_dims": [{ACTION: [3, "7:10"]}]}}, "a.json")
    assert from_json.dataset.select_dims == ({ACTION: ("3", "7:10")},)


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_rows_statistics_and_names_equal_those_of_a_dataset_with_only_these_dims(tmp_path, version):
    ours = selected(make_wide(tmp_path / "wide", version=version))
    theirs = load_meta(str(make_wide(tmp_path / "cut", cut=INDICES, version=version)))
    for key in (ACTION, STATE):
        assert ours.features[key].shape == theirs.features[key].shape
        assert ours.features[key].names == theirs.features[key].names == tuple(NAMES[dim] for dim in INDICES[key])
        assert ours.stats[key].keys() == theirs.stats[key].keys() - {"count"}
        for name, values in ours.stats[key].items():
            np.testing.assert_array_equal(values, theirs.stats[key][name])
        np.testing.assert_array_equal(
            np.concatenate(list(read_parts(ours, key))), np.concatenate(list(read_parts(theirs, key)))
        )
        for name, values in measure([ours], key).items():
            np.testing.assert_array_equal(values, measure([theirs], key)[name])
    mine, other = (read_rows(meta) for meta in (ours, theirs))
    assert mine.keys() == other.keys()
    for name, values in mine.items():
        np.testing.assert_array_equal(values, other[name])


def read_rows(meta):
    binding = bind(SPEC, meta, meta.names)
    (spec,) = read_specs(RunConfig(), [meta], SPEC, [binding], binding)
    frames = np.arange(9)
    return read_unit(spec, make_unit(meta, spec, 1, frames, frames))


def test_read_lerobot_delivers_the_selected_dims(wide, narrow):
    plans = [vlatune.plan_read(wide, select_dims=CHOSEN), vlatune.plan_read(narrow)]
    blocks = []
    for plan in plans:
        task = plan.tasks[0]
        units = [replace(unit, frames=np.arange(3), slots=np.arange(3)) for unit in task.units]
        blocks.append(read_units([task.spec], units))
    assert blocks[0][ACTION].shape[1:] == (50, 5)
    for key in (ACTION, STATE, f"{ACTION}_is_pad"):
        np.testing.assert_array_equal(blocks[0][key], blocks[1][key])


def test_a_feature_may_be_named_as_the_policy_or_as_the_dataset_names_it(wide):
    renamed = replace(load_meta(str(wide)), names={ACTION: "command"})
    for name in (ACTION, "command"):
        assert with_dims([renamed], [{name: [1]}], SELECT_DIMS)[0].features[ACTION].dims == (1,)
    with pytest.raises(ValueError, match="'action' is named twice"):
        with_dims([renamed], [{ACTION: [1], "command": [2]}], SELECT_DIMS)


def test_one_map_for_all_datasets_or_one_for_each(wide, narrow):
    metas = [load_meta(str(wide)), load_meta(str(narrow))]
    each = with_dims(metas, [{ACTION: ["0:5"]}, {}], SELECT_DIMS)
    assert [meta.features[ACTION].dims for meta in each] == [(0, 1, 2, 3, 4), None]
    common = with_dims(metas, [{ACTION: ["right_gripper", "left_arm_3"]}], SELECT_DIMS)
    assert [meta.features[ACTION].dims for meta in common] == [(33, 3), (0, 1)]
    with pytest.raises(ValueError, match="3 maps for 2 datasets"):
        with_dims(metas, [{}, {}, {}], SELECT_DIMS)
    with pytest.raises(ValueError, match="no dataset has a feature 'acton'; did you mean action"):
        with_dims(metas, [{"acton": [0]}], SELECT_DIMS)


def test_dims_that_are_not_selected_may_have_any_value(wide, tmp_path):
    """A broken sensor among dims that are left out is no reason to reject an episode; among the others it is."""
    folder = make_wide(tmp_path / "broken")
    file = folder / "data/chunk-000/file-000.parquet"
    table = pq.read_table(file)
    column = table.column_names.index(ACTION)
    values = np.stack(table.column(ACTION).to_numpy())
    values[2, 4] = np.nan
    rows = pa.FixedSizeListArray.from_arrays(values.reshape(-1), DIMS)
    pq.write_table(table.set_column(column, ACTION, rows), file)

    def reasons(dims):
        meta = selected(folder, dims)
        binding = bind(SPEC, meta, meta.names)
        return check_data_file(meta, read_specs(RunConfig(), [meta], SPEC, [binding], binding)[0], [0])[1]

    assert reasons(CHOSEN) == {}
    assert (
        "frame 2: column 'action' has nan in dim 4, expected a finite number" in reasons({**CHOSEN, ACTION: [9, 4]})[0]
    )


def test_statistics_of_another_width_are_computed_from_the_rows(wide):
    meta = load_meta(str(wide))
    odd = replace(meta, stats={**meta.stats, ACTION: {"q01": np.zeros(5), "q99": np.ones(5)}})
    assert with_dims([odd], [CHOSEN], SELECT_DIMS)[0].stats[ACTION] == {}


def test_too_many_dims_are_rejected_with_flags_that_work(wide):
    meta = load_meta(str(wide))
    with pytest.raises(
        ValueError, match=r"'observation.state' has 34 dims, but the policy supports at most 32"
    ) as caught:
        bind(SPEC, meta, {})
    assert "--policy.type=act" in str(caught.value)
    flag = str(caught.value).rpartition("such as the first: ")[2]
    name, _, value = flag.partition("=")
    config = parse_flags([f"{name}={value.strip(chr(39))}"], RunConfig)
    binding = bind(SPEC, with_dims([meta], config.dataset.select_dims, SELECT_DIMS)[0], {})
    assert (binding.state_dim, binding.action_dim) == (32, 32)


def test_relative_actions_need_the_same_joints(wide):
    """An action dim is relative to the state dim at its place, which must not become another joint."""
    relative = replace(SPEC, relative_exclude=("gripper",), max_state_dim=40)
    with pytest.raises(
        ValueError, match=r"dim 20 \('right_arm_3'\) of 'action' would be relative to dim 0 \('left_arm_0'\)"
    ):
        bind(relative, selected(wide, {ACTION: ["20:24"]}), {})
    assert bind(relative, selected(wide, {ACTION: ["0:4"]}), {}).action_dim == 4
    assert bind(relative, selected(wide, {ACTION: ["20:24"], STATE: ["20:24"]}), {}).action_dim == 4


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([[["a"]], "b"], ("a", "b")),
        ({"axes": [["a", "b"]]}, ("a", "b")),
        ({"left": ["a", "b"], "right": ["a", "b"]}, ("left.a", "left.b", "right.a", "right.b")),
        (["a", 1], ("a", "1")),
        ([], None),
        ({}, None),
        ("a", None),
        (None, None),
    ],
)
def test_names_in_every_form_are_flattened(given, expected):
    assert flat_names(given) == expected


def test_names_of_any_depth_end():
    deep: list = ["a"]
    for _ in range(500):
        deep = [deep]
    assert len(flat_names(deep) or ()) == 1


def test_two_dims_of_one_name_keep_their_figures_apart(tmp_path):
    folder = make_wide(tmp_path / "same", cut={ACTION: [0, 1], STATE: [0, 1]}, names=["joint", "joint"])
    assert bind(SPEC, load_meta(str(folder)), {}).action_names == ("joint_0", "joint_1")
