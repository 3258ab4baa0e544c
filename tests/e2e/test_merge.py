"""`zerodrift convert --merge`: adapters and their base become the same model as with `peft`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.e2e.jobs import ROOT, job
from tests.e2e.small_models import llama
from zerodrift.cli import app
from zerodrift.dtypes import DType
from zerodrift.errors import ZerodriftError
from zerodrift.kernels import narrow
from zerodrift.train.loop.start import train
from zerodrift.train.tools.adapters import merge
from zerodrift.train.tools.sample import TextGenerator, chooser
from zerodrift.weights import ConvertOptions

transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a base in bf16 and a run that has trained adapters on it."""
    folder = tmp_path_factory.mktemp("merge")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        base(folder / "base")
        train(adapted(folder))
    return folder


def base(folder: Path, tied: bool = False) -> None:
    torch.manual_seed(0)
    llama(tie_word_embeddings=tied).bfloat16().save_pretrained(folder)


def adapted(folder: Path, **model: object) -> str:
    """Write a job that trains adapters on the base of a folder, and return its path."""
    lora = {"rank": 2, "targets": ["q_proj", "up_proj"]}
    adamw = {"type": "AdamW", "params": {"lr": 0.5}}
    config = {"precision": {"mode": "fp32"}, "optimizer": adamw, "scheduler": None}
    model = {"source": str(folder / "base"), "lora": lora, "activation_checkpointing": False, **model}
    return str(job(folder, steps=2, config=config, model=model))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def plain(folder: Path, dtype: Any = "auto") -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype)


def adapters(folder: Path, target: str, **rest: Any) -> Path:
    """Make a base and adapters for it by peft."""
    base(folder / "base", tied=target == "lm_head")
    wanted = peft.LoraConfig(target_modules=[target], task_type="CAUSAL_LM", **rest)
    peft.get_peft_model(plain(folder), wanted).save_pretrained(folder / "adapters")
    return folder / "adapters"


def merged_by_peft(model: Any, adapters: Path, folder: Path) -> dict[str, torch.Tensor]:
    peft.PeftModel.from_pretrained(model, adapters).merge_and_unload().save_pretrained(folder)
    return weights(folder)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_door_leads_to_what_peft_makes(
    trained: Path, tmp_path: Path, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run, its export and its checkpoint hold the same adapters in fp32; the verb merges by a tag."""
    of = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    expected = merged_by_peft(plain(trained, of), trained / "run" / "export", tmp_path / "theirs")
    before = weights(trained / "base")
    moved = {name for name in expected if not expected[name].equal(before[name].to(of))}
    assert moved and all("q_proj" in name or "up_proj" in name for name in moved)
    run = trained / "run"
    for number, place in enumerate((run, run / "export", run / "checkpoints" / "step-00000002")):
        target = tmp_path / str(number)
        if place == run:
            words = ["convert", str(run), str(target), "--merge", "--tag", "step-00000002"]
            app([*words, "--dtype", dtype], standalone_mode=False)
            said = capsys.readouterr().out
            assert json.loads((target / "config.json").read_text())["use_cache"] is True
        else:
            said = str(merge(place, target, ConvertOptions(dtype=None if dtype == "bf16" else dtype)))
        assert f"merged into {trained / 'base'}" in said
        found = weights(target)
        assert found.keys() == expected.keys() and all(found[k].equal(expected[k]) for k in found), place
    places = (run, run / "checkpoints", *[tmp_path / "0"] * (dtype == "fp32"))
    models, likeliest = map(TextGenerator, places), chooser(0.0, 0, 0)
    assert len({"".join(model.continue_prompt("It", 4, likeliest)) for model in models}) == 1


def test_a_base_that_rested_in_a_format_is_merged_with_its_decoded_values(tmp_path: Path) -> None:
    base(tmp_path / "base")
    train(adapted(tmp_path, base="nf4"))
    rounded = plain(tmp_path, torch.float32)
    with torch.no_grad():
        for name, value in rounded.named_parameters():
            if "_proj" in name:
                value.copy_(narrow.round_trip(DType.NF4_64, value))
    expected = merged_by_peft(rounded, tmp_path / "run" / "export", tmp_path / "theirs")
    texts = set()
    for place in (tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000002"):
        for dtype in (None, "fp32"):
            target = tmp_path / f"{place.name}-{dtype}"
            merge(place, target, ConvertOptions(dtype=dtype))
            of = torch.float32 if dtype else torch.bfloat16
            found = weights(target)
            assert all(found[name].equal(value.to(of)) for name, value in expected.items())
        texts.add("".join(TextGenerator(place).continue_prompt("It", 4, chooser(0.0, 0, 0))))
    assert len(texts) == 1


def moved(folder: Path) -> None:
    (folder / "base").rename(folder / "elsewhere")


def changed(folder: Path) -> None:
    held = weights(folder / "base")
    held["model.norm.weight"][3] += 1
    save_file(held, folder / "base" / "model.safetensors", {"format": "pt"})


def other(folder: Path) -> str:
    base(folder / "tied", tied=True)
    return str(folder / "tied")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (moved, "`the base of the adapters`: must exist, as it did in training"),
        (changed, "must go with the base that its adapters were trained on"),
        (other, "must go with the base that its adapters were trained on"),
    ],
)
def test_another_base_is_refused(
    trained: Path, tmp_path: Path, change: Callable[[Path], str | None], words: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    for file in (folder / "run" / "job.json", folder / "run" / "export" / "base.json"):
        file.write_text(file.read_text().replace(str(trained), str(folder)))
    named = change(folder)
    for place in ("run", "run/checkpoints"):
        with pytest.raises(ZerodriftError, match=re.escape(words)):
            merge(folder / place, tmp_path / "merged", base_path=named)
    assert not (tmp_path / "merged").exists()
    if change is moved:  # and where it is named, it is found
        merge(folder / "run", tmp_path / "merged", base_path=str(folder / "elsewhere"))
        assert weights(tmp_path / "merged")


def test_a_whole_model_and_a_tied_weight_are_refused(trained: Path, tmp_path: Path) -> None:
    with pytest.raises(ZerodriftError, match="must hold adapters to merge; got a whole model"):
        merge(trained / "base", tmp_path / "merged")
    with pytest.raises(ZerodriftError, match=r"one on `lm_head`, whose weight is tied.*keep the adapters\."):
        merge(adapters(tmp_path, "lm_head"), tmp_path / "merged")


def test_adapters_of_others_merge_and_say_what_is_not_known(tmp_path: Path) -> None:
    theirs = adapters(tmp_path, "q_proj", init_lora_weights=False)
    assert "the base was not checked" in str(merge(theirs, tmp_path / "merged"))
    found = weights(tmp_path / "merged")
    expected = merged_by_peft(plain(tmp_path), theirs, tmp_path / "theirs")
    assert all(found[name].equal(expected[name]) for name in expected)


def test_a_run_does_not_go_on_with_another_base(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(trained, folder)
    changed(folder)
    with pytest.raises(ZerodriftError, match=r"`model\.source`: must be the base that the adapters were"):
        train(adapted(folder), ["run.steps=3"])
