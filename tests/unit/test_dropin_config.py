"""The drop-in reads a config as DeepSpeed does: spellings of offload, Hjson, and keys that stand twice."""

from __future__ import annotations

import base64
import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zerodrift
from zerodrift.deepspeed.config import written_config
from zerodrift.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum as Device
from zerodrift.errors import ConfigError


@pytest.mark.parametrize(
    ("zero", "offloads"),
    [
        ({"cpu_offload": True}, True),
        ({"cpu_offload": True, "cpu_offload_use_pin_memory": True}, True),
        ({"cpu_offload": False, "cpu_offload_param": True}, False),
        ({"offload_optimizer": {"device": Device.cpu}}, True),
        ({"offload_optimizer": {"device": Device.none}, "offload_param": {"device": Device.cpu}}, False),
        ({"offload_param": {"device": "cpu", "pin_memory": True}}, False),
    ],
)
def test_offload_in_every_spelling(zero: dict[str, Any], offloads: bool) -> None:
    written = {**zero, "stage": 3}
    policy = zerodrift.resolve({"zero_optimization": written}, zerodrift.MeshShape(shard=2))
    assert policy.sharding.offload is offloads
    assert written == {**zero, "stage": 3}  # what the caller has is as it was


def test_keys_with_dots_are_the_keys_that_they_name(caplog: pytest.LogCaptureFixture) -> None:
    zero = {"stage": 3, "reduce_bucket_size": 5, "stage3_prefetch_bucket_size": "auto"}
    dotted = {"reduce_bucket_size": 1024, "stage3_prefetch_bucket_size": np.float32(921.5)}
    written = {"zero_optimization": zero, **{f"zero_optimization.{key}": dotted[key] for key in dotted}}
    written |= {"bf16.enabled": True, "train_batch_size": np.int64(8)}
    before, loaded = copy.deepcopy(written), zerodrift.load(written)
    found = written_config(None, written, None)
    assert written == before and loaded.bf16 and loaded.bf16.enabled and loaded.train_batch_size == 8
    assert found["zero_optimization"] == {**zero, "stage3_prefetch_bucket_size": 921.5}
    (ignored,) = [use for use in loaded.keys if use.path == "zero_optimization.reduce_bucket_size"][1:]
    assert ignored.because == "its block has 5, which holds" and ignored.because in caplog.text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{a: 1 # one\n b: two words // and\n}", {"a": 1, "b": "two words // and"}),
        ('{"a": [1, 2,], /* so */ "b": {c: null}}', {"a": [1, 2], "b": {"c": None}}),
        ('{"a": 1, /* so */ "a": 2}', None),
        ('{"a": 1', None),
    ],
)
def test_hjson(text: str, value: Any, tmp_path: Path) -> None:
    """Hjson is read by the package that DeepSpeed requires; a key that is there twice is an error."""
    pytest.importorskip("hjson")
    coded = base64.urlsafe_b64encode(text.encode()).decode()
    (tmp_path / "config.json").write_text(text)
    for way in (coded, str(tmp_path / "config.json")):
        if value is None:
            with pytest.raises(ConfigError):
                zerodrift.load(written_config(None, way, None))
        else:
            assert written_config(None, way, None) == value


def test_a_key_that_a_file_has_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"bf16": {"enabled": true}, "fp16": {}, "bf16": {}}')
    with pytest.raises(ConfigError, match="`bf16`: must be written once"):
        written_config(None, str(path), None)
