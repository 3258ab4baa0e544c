"""The name `zerodrift` in hydra's groups: `engine=zerodrift` for SFT, `model_engine=zerodrift` for PPO.

A block of verl's for fsdp becomes ours by its engine and its strategy; all else in it stays verl's own.

Invariant: importing this adds names and changes none.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import verl
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from zerodrift.verl.config import NAME, ZeroDriftEngineConfig

FOLDER = Path(verl.__file__).parent / "trainer" / "config"
ROLES = ("actor", "ref", "critic")


def register() -> None:
    def add(group: str, name: str, node: Any, package: str | None = None) -> None:
        ConfigStore.instance().store(group=group, name=name, node=node, package=package, provider=NAME)

    add("engine", NAME, engine())
    add("model_engine", NAME, {"model_engine": NAME}, "_global_")
    for role in ROLES:
        add(role, f"{NAME}_{role}", of_role(role))


def engine() -> dict[str, Any]:
    """All fields, as they are where a user writes none."""
    own: dict[str, Any] = {"_target_": f"zerodrift.verl.{ZeroDriftEngineConfig.__name__}"}
    for one in fields(ZeroDriftEngineConfig):
        if one.name not in ("_target_", "router_replay"):
            own[one.name] = one.default if one.default_factory is MISSING else one.default_factory()
    return own


def of_role(role: str) -> Any:
    """verl's block for fsdp with this engine in it."""
    block: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / role / f"dp_{role}.yaml"), resolve=False)
    block["defaults"] = [
        {key.replace("../", "/"): NAME for key in default} if "../engine@" in str(default) else default
        for default in block["defaults"]
    ]
    if role != "ref":
        return block | {"strategy": NAME}
    # A reference follows the actor, whose precision it is compared in.
    actor = "actor_rollout_ref.actor.fsdp_config"
    block["fsdp_config"] |= {key: f"${{oc.select:{actor}.{key},null}}" for key in ("config", "pins", "dtype")}
    return block
