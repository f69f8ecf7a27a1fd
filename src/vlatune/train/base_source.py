"""Bring the base model to training nodes that do not have the driver's folder. No Ray."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vlatune.checkpoint.store import absolute_storage
from vlatune.config.settings import RunConfig
from vlatune.errors import RunStoppedError
from vlatune.policies.base_folder import REPOSITORY_FILES, base_weights, resolve_folder, short_hash
from vlatune.run.mirror import BASES, base_url
from vlatune.storage.files import MAX_JSON_BYTES, read_file
from vlatune.storage.paths import is_local, is_repository
from vlatune.storage.root import Root
from vlatune.storage.url_folder import files_below, upload_folder

SMALL_BYTES = 1 << 30


@dataclass(frozen=True)
class BaseSource:
    """Location of the base model for a node; plain values, sent to every worker."""

    folder: str
    """Folder of the driver, used where it exists with the same content."""
    content: str
    """Hash of the names and sizes of the files, the small ones and the first bytes of each weight."""
    url: str | None
    """URL or hub repository, for nodes without the folder."""
    revision: str | None = None

    @property
    def is_from_driver(self) -> bool:
        """True if the driver uploads its folder for the nodes."""
        return self.url is not None and self.url.endswith(f"/{BASES}/{self.content}")


def find_source(config: RunConfig, folder: str) -> BaseSource:
    """Return where the nodes of a cluster get the base model in `folder` of the driver."""
    path, storage, content = config.policy.path or "", absolute_storage(config.storage_path), hash_base(Path(folder))
    if not is_local(path) or (is_repository(path) and not Path(path).is_dir()):
        return BaseSource(folder, content, path, config.policy.revision)
    has_store = storage is not None and not is_local(storage)
    return BaseSource(folder, content, base_url(storage, content) if storage and has_store else None)


def is_small(source: BaseSource) -> bool:
    """True if the base model is also uploaded where the run does not need it, for `eval` and `export` elsewhere."""
    folder = Path(source.folder)
    return sum((folder / name).stat().st_size for name in files_below(folder, REPOSITORY_FILES)) <= SMALL_BYTES


def publish_base(source: BaseSource) -> None:
    """Upload the driver's folder if nodes get the base model from the store."""
    if source.is_from_driver and source.url:
        folder = Path(source.folder)
        upload_folder(folder, files_below(folder, REPOSITORY_FILES), Root(source.url, has_checksums=False))


def local_base(source: BaseSource, on_chunk: Callable[[], object] = lambda: None) -> str:
    """Return the folder of the base model on this node; fetched once if it does not exist."""
    if has_base(source):
        return source.folder
    if source.url is None:
        raise RunStoppedError(f"base model '{source.folder}' is not on this node; {REMEDY}")
    folder = resolve_folder(source.url, source.revision, on_chunk)
    if hash_base(folder) != source.content:
        raise RunStoppedError(f"base model '{source.url}' differs from the driver's; do not change it during a run")
    return str(folder)


REMEDY = (
    "give a --storage_path that all nodes reach (s3://...), through which they get it, put it on a disk that all nodes "
    "share, or copy it to the same path on every node"
)


def has_base(source: BaseSource) -> bool:
    """True if this node has the driver's folder with the same content."""
    try:
        return hash_base(Path(source.folder)) == source.content
    except (OSError, ValueError):
        return False


def hash_base(folder: Path) -> str:
    """Return a hash of a base model that is cheap to compute."""
    return short_hash(_parts(folder))


def _parts(folder: Path) -> Iterator[bytes]:
    for name in files_below(folder, REPOSITORY_FILES):
        num_bytes = (folder / name).stat().st_size
        yield f"{name} {num_bytes}".encode()
        if name.endswith(".json") and num_bytes <= MAX_JSON_BYTES:
            yield read_file(folder, name)
    yield base_weights(folder).encode()
