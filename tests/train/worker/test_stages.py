"""The clocks of the feed and of the prefetcher, as the worker reads them together."""

from types import SimpleNamespace

from vlatune.pipeline.feed import StageTimes
from vlatune.train.worker.loop import Worker


def test_the_feeds_clocks_and_the_prefetchers_are_added_stage_by_stage():
    worker = SimpleNamespace(
        feed=SimpleNamespace(times=StageTimes(decode_s=8.0, transport_s=2.0, collate_s=1.0)),
        batches=SimpleNamespace(stage_s=lambda: {"collate": 0.5, "copy": 4.0}),
    )
    assert Worker._stages_s(worker) == {"decode": 8.0, "transport": 2.0, "collate": 1.5, "copy": 4.0}
