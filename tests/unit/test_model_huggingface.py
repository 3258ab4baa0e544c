"""A ModelSpec of a config describes the model that `from_pretrained` would make."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.refusals import error_of
from zerodrift.dtypes import DType, from_torch
from zerodrift.errors import ModelError
from zerodrift.model import describe, huggingface
from zerodrift.model.huggingface import from_hf
from zerodrift.model.module import from_module
from zerodrift.model.spec import ModelSpec, OwningModule, ParameterSpec
from zerodrift.record import encode

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "dtype": "bfloat16"}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SMALL |= dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"tie_word_embeddings": True, "architectures": ["LlamaForCausalLM"]},
    "qwen3_moe": SMALL | EXPERTS | {"num_experts": 4},
    "gpt_oss": SMALL | {"num_local_experts": 4, "num_experts_per_tok": 2, "dtype": "float16"},
    "deepseek_v3": SMALL | EXPERTS | {"num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2},
}
CONFIGS["deepseek_v3"] |= {"topk_group": 1, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8}
CONFIGS["deepseek_v3"] |= {"qk_rope_head_dim": 4, "v_head_dim": 8, "first_k_dense_replace": 1, "head_dim": 4}


def folder(path: Path, model_type: str, **changed: Any) -> Path:
    """Write a folder with the small config of a kind of model."""
    path.mkdir(exist_ok=True)
    config = {"model_type": model_type} | CONFIGS.get(model_type, SMALL) | changed
    (path / "config.json").write_text(json.dumps(config))
    return path


refusal = partial(error_of, ModelError, from_hf)


def dtypes(spec: ModelSpec) -> dict[str, DType]:
    named = {parameter.name: parameter.dtype for parameter in spec.parameters}
    return named | {buffer.name: buffer.dtype for buffer in spec.buffers}


ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "num_key_value_heads": 4}
T5 = {"architectures": ["T5ForConditionalGeneration"], "d_ff": 48}
LOADED: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {}) for model_type in CONFIGS),
    ("ernie4_5_moe", ERNIE),
    ("t5", T5 | {"dtype": "float16"}),
]
"""Models that are loaded, some of which keep parameters in fp32, each in some versions."""


@pytest.mark.parametrize(("model_type", "changed"), LOADED)
def test_the_spec_is_that_of_the_loaded_model(tmp_path: Path, model_type: str, changed: Any) -> None:
    folder(tmp_path, model_type, **changed)
    described = from_hf(tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    auto = transformers.AutoModelForSeq2SeqLM if model_type == "t5" else transformers.AutoModelForCausalLM
    built = auto.from_config(config)
    built.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, dtype="auto")
    for name, parameter in built.named_parameters():  # the loader of version 5 forgets what is not trained
        loaded.get_parameter(name).requires_grad = parameter.requires_grad
    expected = from_module(loaded)
    assert (described.parameters, described.buffers) == (expected.parameters, expected.buffers)
    assert described.source == f"{tmp_path} ({type(loaded).__name__})"
    assert described.checkpoint == ()
    first = expected.parameters[0]
    assert dict(from_hf(tmp_path).checkpoint)[first.name] is first.dtype
    # The same without our reading of a module.
    tensors = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
    assert dtypes(described) == {name: from_torch(tensor.dtype) for name, tensor in tensors.items()}
    for owner in (owner for parameter in described.parameters for owner in parameter.owners):
        klass = type(loaded.get_submodule(owner.path))
        assert owner.klass == f"{klass.__module__}.{klass.__qualname__}"


def test_tied_embeddings_are_one_parameter(tmp_path: Path) -> None:
    (embedding, *_) = from_hf(folder(tmp_path, "llama")).parameters
    assert embedding.names == ("model.embed_tokens.weight", "lm_head.weight")
    apart = from_hf(folder(tmp_path, "llama", tie_word_embeddings=False)).parameters
    assert [apart[place].names for place in (0, -1)] == [("model.embed_tokens.weight",), ("lm_head.weight",)]


def test_the_dtype_is_the_configs_else_the_checkpoints_else_fp32(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    def norm(file: str = "") -> DType:
        return dtypes(from_hf(tmp_path / file))["model.norm.weight"]

    folder(tmp_path, "llama", dtype=None)
    assert norm() is DType.FP32
    stored = {"steps": torch.zeros(1, dtype=torch.int32), "w": torch.zeros(1).half()}
    save_file(stored, tmp_path / "a.safetensors")
    assert norm() is DType.FP16 and norm("config.json") is DType.FP32
    folder(tmp_path, "llama", dtype="bfloat16")
    assert norm() is DType.BF16
    config = json.loads((tmp_path / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert norm() is DType.BF16


def test_the_class_is_the_named_one_else_causal_else_base(tmp_path: Path) -> None:
    def built(model_type: str, **changed: Any) -> str:
        return from_hf(folder(tmp_path, model_type, **changed)).source.partition("(")[2].rstrip(")")

    named = "LlamaForSequenceClassification"
    assert built("llama", architectures=[named]) == named
    for other in (None, ["OfTheirOwn"], ["GPT2LMHeadModel"]):
        assert built("llama", architectures=other) == "LlamaForCausalLM"
    assert built("vit", architectures=None) == "ViTModel"


def test_an_attention_kernel_and_a_quantization_that_are_not_here_do_not_matter(tmp_path: Path) -> None:
    plain = from_hf(folder(tmp_path, "llama"))
    assert from_hf(folder(tmp_path, "llama", attn_implementation="flash_attention_2")) == plain
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert from_hf(folder(tmp_path, "llama", quantization_config=fp8)) == plain


def test_a_config_that_is_not_json_and_a_broken_checkpoint_beside_one(tmp_path: Path) -> None:
    path = folder(tmp_path, "llama") / "config.json"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "model.safetensors`: must open with a header length" in refusal(tmp_path)
    assert from_hf(path).checkpoint == ()
    path.write_text('{\n  "model_type": llama\n}')
    assert "config.json`: must be JSON; got Expecting value at line 2, column 17." in refusal(tmp_path)
    text = refusal(folder(tmp_path / "other", "llama", hidden_act="no-such-activation"))
    assert "config.json`: must be a config that " in text and "\n" not in text


AUTO = {"auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        (None, "got no such key. Is it the config of a model?"),
        ("lama", "got 'lama'. Did you mean `llama`"),
    ],
)
def test_a_model_type_that_is_missing_or_unknown(tmp_path: Path, model_type: Any, said: str) -> None:
    text = refusal(folder(tmp_path, model_type, **AUTO))
    assert "`model_type` must be one that the installed `transformers` knows" in text and said in text


def test_code_beside_a_config_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("raise SystemExit('it ran')\n")
    assert from_hf(folder(tmp_path, "llama", **AUTO)).parameters


# --- cached descriptions ----------------------------------------------------------------------------------


DESCRIBE = """
import json, sys
path, *sources = json.loads(sys.stdin.read())
sys.path[:] = path
from zerodrift.model import describe
from zerodrift.record import encode
specs = [encode(describe(each)) for each in sources]
print(json.dumps([specs, sorted({"torch", "transformers"} & sys.modules.keys())]))
"""


def test_a_model_is_described_again_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families = [("llama", {}), ("t5", T5), ("vit", {"architectures": None})]
    paths = [str(folder(tmp_path / str(at), kind, **changed)) for at, (kind, changed) in enumerate(families)]
    whole = [encode(from_hf(path)) for path in paths]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr(huggingface, "_is_fresh", lambda: True)
        patched.setitem(sys.modules, "generated", SimpleNamespace(__file__="<generated>.py"))
        assert [encode(describe(path)) for path in paths] == whole
    assert len(list((tmp_path / "cache").glob("zerodrift/models/*.json"))) == len(paths)
    command, asked = [sys.executable, "-c", DESCRIBE], json.dumps([sys.path, *paths])
    done = subprocess.run(command, input=asked, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout) == [whole, []]


OWNERS = (OwningModule("", "x.Y"), OwningModule("b", ""))
SPEC = ModelSpec(
    "Tiny",
    (ParameterSpec(("a", "b"), (2, 3), DType.BF16, OWNERS, used=(1, 2)),),
    checkpoint=(("a", DType.FP16),),
    containers=frozenset({"layers", "heads"}),
    shared=(("b", "a"),),
)


def test_an_entry_holds_until_a_file_behind_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, entry = tmp_path / "model.py", tmp_path / "models" / "entry.json"
    source.write_text("x")
    monkeypatch.setattr(huggingface, "_imported", lambda: [str(source)])
    huggingface.write_description(entry, SPEC)
    assert huggingface.read_description(entry) == SPEC
    whole = entry.read_text()
    for damaged in (whole[:-9], "{}", whole.replace('"bf16"', '"bf17"')):
        entry.write_text(damaged)
        assert huggingface.read_description(entry) is None
    entry.write_text(whole)
    source.write_text("xy")
    assert huggingface.read_description(entry) is None


def test_an_entry_is_found_by_all_that_it_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert huggingface.entry_of({}, None) is None, "this process has imported torch"
    monkeypatch.setattr(huggingface, "_is_fresh", lambda: True)
    entries = [huggingface.entry_of({}, None) for _ in range(2)]
    entries += [huggingface.entry_of({"layers": 1}, None), huggingface.entry_of({}, DType.BF16)]
    monkeypatch.syspath_prepend(str(tmp_path))
    entries.append(huggingface.entry_of({}, None))
    (tmp_path / "apex-1.0.dist-info").mkdir()
    entries.append(huggingface.entry_of({}, None))
    assert entries[0] == entries[1] and len(set(entries)) == 5
