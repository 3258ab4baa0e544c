"""A job file: every wrong key at once, overrides, and the config inside it."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.refusals import error_of
from zerodrift.api import empty
from zerodrift.config.fields import every_key
from zerodrift.dtypes import DType
from zerodrift.errors import ConfigError, ModelError, UnsupportedError, ZerodriftError
from zerodrift.train.job import Job, Lora, Model
from zerodrift.train.job_file import read_job
from zerodrift.train.loop.model import build, check_causal, source_of
from zerodrift.train.loop.run_folder import require_writable


def least(**more: Any) -> dict[str, Any]:
    return {"model": {"source": "x"}, "data": {"train": "y"}, **more}


def test_what_is_written_and_what_is_not() -> None:
    job, config = read_job(least())
    assert (job.run.folder, job.run.keep, job.model.lora) == ("runs/job", 2, None)
    assert config.optimizer is None
    assert read_job(least(model={"source": "x", "lora": {}}))[0].model.lora == Lora()
    overrides = ["run.steps=7", "data.block=1e2", "config.zero_optimization.stage=2", "model.lora.rank=4"]
    job, config = read_job(least(config={"precision": {"mode": "bf16"}}), overrides)
    assert (job.run.steps, job.data.block, job.model.lora) == (7, 100, Lora(rank=4))
    assert (config.zero_optimization.stage, config.precision.mode) == (2, "bf16")


KEYS = least(modle={}, run={"setps": 3, "zero_optimization": {}}, config={"bf16": {"enable": True}})
VALUES = {"model": {"source": 3, "compile": "yes"}, "data": {"block": "16", "format": "txt"}, "config": 7}
BASE = least(model={"source": "x", "base": "nf4"}, config={"precision": {"frozen": "int8"}})
WRONG: dict[str, tuple[dict[str, Any], list[str]]] = {
    "keys, with their nearest matches": (
        KEYS,
        [
            "`modle`: must be a key of a job. Did you mean `model`?",
            "`run.setps`: must be a key of `run`. Did you mean `steps`",
            "Did you mean `config.zero_optimization`?",
            "`bf16.enable`: must be a key of `bf16`. Did you mean `enabled`?",
        ],
    ),
    "values, with what a config says of such": (
        VALUES,
        [
            "`model.source`: must be a string; got 3.",
            "`model.compile`: must be true or false; got 'yes'. Write true without quotes.",
            "`data.train`: must be given: a string",
            "`data.block`: must be a whole number of at least 2; got '16'. Write 16 without quotes.",
            '"tokens" or "files"; got \'txt\'. Did you mean `text`?',
            "`config`: must be a block of keys or a string; got 7.",
        ],
    ),
    "the format of a base": (
        BASE,
        [
            "`model.base`: must agree with `config.precision.frozen`, which says int8-256; got nf4.",
            "`model.base`: must go with `model.lora` or `model.freeze`",
        ],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_everything_that_is_wrong_is_told_at_once(case: str) -> None:
    wrong, lines = WRONG[case]
    told = error_of(ConfigError, read_job, wrong)
    assert all(line in told for line in lines), told


def test_the_format_of_a_base_is_a_key_of_the_config() -> None:
    written = least(model={"source": "x", "lora": {}, "base": "nf4"}, config={"precision": {"mode": "bf16"}})
    job, config = read_job(written)
    assert config.precision.frozen is DType.NF4_64
    assert job.config == {"precision": {"mode": "bf16", "frozen": "nf4"}}
    again, _ = read_job(job.model_dump(mode="json", by_alias=True))
    assert again == job


def test_a_config_file_is_read_and_overridden(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}))
    job, config = read_job(least(config=str(file)), ["config.zero_optimization.stage=3"])
    assert job.config == {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    assert config.zero_optimization.stage == 3 and config.bf16 is not None
    file.write_text(json.dumps({"bf16": {"enable": True}}))
    with pytest.raises(ConfigError, match=r"ds\.json: `bf16\.enable`"):
        read_job(least(config=str(file)))


def test_adapters_on_the_model_of_a_function_are_refused() -> None:
    pytest.importorskip("peft")
    with pytest.raises(UnsupportedError, match=r"`model\.lora`: must go with a `transformers` model; got "):
        build(source_of(Model(source="tests.e2e.small_models:plain", lora=Lora())))


ODD = (
    *(0, -1, 2**63, 10**400, math.nan, math.inf, 1e308, True, None, "", "no", "1e-5"),
    *({}, [], {1: 2}, {1}, [["a"]], b"x", object(), "\ud800", "\0", "\x1b[31m" * 900),
)
PATHS = [key.path for key in every_key(Job)]
ENDLESS = ("x" * 10**6, ["a"] * 10**5, functools.reduce(lambda made, _: [made], range(10_000), []))


@pytest.mark.parametrize("key", ["config", "config.gradient_clipping", "auto", *PATHS])
def test_odd_values_are_read_or_refused_at_once(key: str) -> None:
    """Every key of a job gets its value, or one short error that a terminal can show."""
    for value in (*ODD, *(ENDLESS if key in ("config", "auto", "data.train", "run.steps") else ())):
        *blocks, last = key.split(".")
        place = written = least()
        for block in blocks:
            place = place.setdefault(block, {})
        place[last] = value
        begun = time.process_time()
        try:
            made, _ = read_job(written)
            json.dumps(made.model_dump(mode="json"))
        except ZerodriftError as error:
            assert len(str(error)) < 50_000 and all(map(str.isprintable, str(error).split("\n")))
        assert time.process_time() - begun < 1.0


@pytest.mark.parametrize("place", ["file/below", "/proc/none"])
def test_a_folder_that_cannot_be_written_is_refused_by_its_key(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"`run\.folder`: must be a folder that can be written; got "):
        require_writable("run.folder", tmp_path / place)
    require_writable("run.folder", tmp_path / "new" / "one")


# --- what is refused before anything is read --------------------------------------------------------------


SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}


@pytest.mark.parametrize(
    ("kind", "more", "fine"),
    [
        ("bert", {}, False),
        ("bert", {"is_decoder": True}, True),
        ("llama", {"num_key_value_heads": 1}, True),
    ],
)
def test_an_encoder_is_no_language_model(kind: str, more: dict[str, Any], fine: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, vocab_size=40, **SIZES, **more)
    with empty():
        model = transformers.AutoModelForCausalLM.from_config(config)
    told = pytest.raises(ModelError, match=rf"must be a causal language model.*an encoder \({kind}\)")
    with contextlib.nullcontext() if fine else told:
        check_causal(model, kind)
