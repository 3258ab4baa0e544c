"""Metrics reach TensorBoard, also after a run was resumed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.jobs import job, losses
from zerodrift.train.loop.start import train


def test_tensorboard_has_every_step_once(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = {"tensorboard": True, "checkpoint_every": 2, "evaluate_every": 3}
    data = {"validation": 0.1}
    train(str(job(tmp_path, steps=5, run=board, data=data)))
    (tmp_path / "run" / "checkpoints" / "latest").write_text("step-00000004")  # as if killed
    train(str(job(tmp_path, steps=6, run=board, data=data)))
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    seen = {event.step: event.value for event in events.Scalars("loss")}
    assert len(events.Scalars("loss")) == 6
    assert seen == pytest.approx(losses(tmp_path))
    assert [event.step for event in events.Scalars("validation_loss")] == [3, 6]
    assert {"grad_norm", "lr", "tokens_per_second", "memory"} <= set(events.Tags()["scalars"])
