"""Wrong paths on the command line are named, with a suggestion."""

import pytest

from vlatune.storage.paths import is_repository, require_base, require_dataset, require_output, require_run


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "summary.json"])
def test_a_folder_with_any_file_of_a_run_is_a_run(tmp_path, name):
    with pytest.raises(ValueError, match=r"it has no config\.json or metrics\.jsonl or summary\.json"):
        require_run(tmp_path)
    (tmp_path / name).touch()
    require_run(tmp_path)


def test_a_misspelt_folder_gets_a_suggestion(tmp_path):
    (tmp_path / "fold_towel/meta").mkdir(parents=True)
    (tmp_path / "fold_towel/meta/info.json").touch()
    require_dataset(str(tmp_path / "fold_towel"), argument="--dataset.root")
    require_dataset(f"file://{tmp_path / 'fold_towel'}", argument="--dataset.root")
    with pytest.raises(ValueError, match=f"no such folder; did you mean {tmp_path}/fold_towel"):
        require_dataset(str(tmp_path / "fold_twel"), argument="--dataset.root")
    with pytest.raises(ValueError, match=r"it has no meta/info\.json.*--dataset\.root must be the folder"):
        require_dataset(str(tmp_path), argument="--dataset.root")


def test_urls_and_repositories_are_not_checked(tmp_path):
    require_dataset("s3://bucket/set", argument="--dataset.root")
    require_base("owner/name")
    with pytest.raises(ValueError, match=r"it has no config\.json; --policy\.path must be"):
        require_base(str(tmp_path))
    (tmp_path / "config.json").touch()
    require_base(str(tmp_path))
    assert not is_repository("./owner/name")
    with pytest.raises(ValueError, match="neither a hub repository"):
        require_base("/owner/name")


def test_an_output_folder(tmp_path):
    require_output(tmp_path / "new", resumes=False)
    with pytest.raises(ValueError, match="there is no run in"):
        require_output(tmp_path / "new", resumes=True)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="it is a file; use another --output_dir"):
        require_output(tmp_path / "file", resumes=False)
