"""Runs on torch alone that lose nothing: `plain.py KIND [digest]`, one function each."""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tiny import VOCABULARY, WIDTH, Dense, Tiny, batch, fit, loss_of, rank, start

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def clipped(model: nn.Module, micro_batches: int = 1) -> nn.Module:
    clip = torch.nn.utils.clip_grad_norm_
    return fit(model, micro_batches=micro_batches, before=lambda: clip(model.parameters(), 1.0))


def one_process() -> nn.Module:
    return clipped(Tiny(), micro_batches=2)


def ddp() -> nn.Module:
    return clipped(DistributedDataParallel(Tiny()))


def ddp_autocast() -> nn.Module:
    return fit(DistributedDataParallel(Dense()), autocast=True)


def ddp_fp16() -> nn.Module:
    model = DistributedDataParallel(Dense())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        tokens, targets = batch(rank(), step)
        with torch.autocast("cpu", torch.float16):
            logits = model(tokens)
        scaler.scale(loss_of(logits, targets)).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def ddp_no_sync() -> nn.Module:
    model = DistributedDataParallel(Tiny())
    return fit(model, micro_batches=4, unsynchronized=model.no_sync)


def fsdp2() -> nn.Module:
    model = Dense()
    for unit in (model.up, model.down, model):
        fully_shard(unit, mp_policy=BF16)
    return clipped(model, micro_batches=2)


def fsdp2_norms() -> nn.Module:
    """Train with norms that compute in fp32, as units of their own."""
    model = Dense()
    wide = MixedPrecisionPolicy(cast_forward_inputs=True, output_dtype=torch.bfloat16)
    fully_shard(model.norm, mp_policy=wide)
    fully_shard(model, mp_policy=BF16)
    return clipped(model)


def fsdp1() -> nn.Module:
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    model = FullyShardedDataParallel(
        Dense(), mixed_precision=precision, use_orig_params=True, device_id=torch.device("cpu")
    )
    return fit(model, before=lambda: model.clip_grad_norm_(1.0))


def ema() -> nn.Module:
    """Train with an exponential moving average, which has no gradient."""
    model = DistributedDataParallel(Tiny())
    average = copy.deepcopy(model.module).requires_grad_(False)

    def follow(step: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.module.parameters(), strict=True):
                slow.lerp_(fast, 0.01)

    return fit(model, after=follow)


def gan() -> nn.Module:
    """Train two models with two optimizers in one loop."""
    maker = DistributedDataParallel(nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8)))
    judge = DistributedDataParallel(nn.Sequential(nn.Linear(8, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)))
    makes = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judges = torch.optim.Adam(judge.parameters(), lr=1e-3)
    judged = nn.functional.binary_cross_entropy_with_logits
    source = torch.Generator().manual_seed(rank())
    for _ in range(4):
        noise, real = torch.randn(16, 4, generator=source), torch.rand(16, 8, generator=source)
        (
            judged(judge(real), torch.ones(16, 1)) + judged(judge(maker(noise).detach()), torch.zeros(16, 1))
        ).backward()
        judges.step()
        judges.zero_grad()
        judged(judge(maker(noise)), torch.ones(16, 1)).backward()
        makes.step()
        makes.zero_grad()
        judges.zero_grad()
    return nn.ModuleList((maker, judge))


def distillation() -> nn.Module:
    """Train a student in fp32 with a frozen teacher in bf16."""
    teacher = Dense().to(torch.bfloat16).requires_grad_(False).eval()
    student = DistributedDataParallel(Dense())
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for step in range(4):
        tokens, _ = batch(rank(), step)
        with torch.no_grad():
            told = teacher(tokens).float().log_softmax(-1)
        said = student(tokens).log_softmax(-1)
        nn.functional.kl_div(said, told, log_target=True, reduction="batchmean").backward()
        optimizer.step()
        optimizer.zero_grad()
    return student


class Adapted(nn.Module):
    """A frozen linear in bf16 with two low-rank factors in fp32."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(4, base.in_features) / 8)
        self.b = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + ((x.float() @ self.a.T) @ self.b.T).to(x.dtype)


def lora() -> nn.Module:
    """Train two adapters of one shape, whose second factors both begin at zero."""
    base = (nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    for module in (*base, head):
        module.to(torch.bfloat16).requires_grad_(False)
    adapted = nn.Sequential(base[0], Adapted(base[1]), nn.ReLU(), Adapted(base[2]), head)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    return fit(DistributedDataParallel(adapted), torch.optim.AdamW(trained, lr=1e-2))


def averaged_weights() -> nn.Module:
    """Average weights over ranks after every second step, and no gradients."""
    model = Dense()

    def average(step: int) -> None:
        for parameter in model.parameters() if step % 2 else ():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    return fit(model, torch.optim.SGD(model.parameters(), lr=0.1), after=average)


def averaged_updates() -> nn.Module:
    """Step an outer optimizer with what ranks have moved apart from its weights, as DiLoCo does."""
    model = Dense()
    outer = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(outer, lr=0.7, momentum=0.9, nesterov=True)

    def average(step: int) -> None:
        if step % 2:
            for weight, parameter in zip(outer, model.parameters(), strict=True):
                weight.grad = weight.detach() - parameter.detach()
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
            optimizer.step()
            with torch.no_grad():
                for weight, parameter in zip(outer, model.parameters(), strict=True):
                    parameter.copy_(weight)

    return fit(model, after=average)


class OwnExpert(Dense):
    """A dense model with an expert that is this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(10 + rank())
        self.expert = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.expert(self.norm(x)) + self.down(torch.relu(self.up(x))))


def own_expert() -> nn.Module:
    """Average the gradients of all but the rank's own expert."""
    model = OwnExpert()
    shared = [parameter for name, parameter in model.named_parameters() if not name.startswith("expert.")]

    def average() -> None:
        for parameter in shared:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    return fit(model, before=average)


def digest(model: nn.Module) -> str:
    """Return a SHA-256 of every bit of this rank's parameters."""
    total = hashlib.sha256()
    for parameter in model.parameters():
        local = parameter.detach()
        local = local.to_local() if isinstance(local, DTensor) else local
        total.update(local.contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__: kind
    for kind in (
        *(one_process, ddp, ddp_autocast, ddp_fp16, ddp_no_sync, fsdp2, fsdp2_norms, fsdp1),
        *(ema, gan, distillation, lora, averaged_weights, averaged_updates, own_expert),
    )
}

if __name__ == "__main__":
    start()
    trained = KINDS[sys.argv[1]]()
    if "digest" in sys.argv:
        print(f"rank {rank()}: {digest(trained)}", flush=True)
