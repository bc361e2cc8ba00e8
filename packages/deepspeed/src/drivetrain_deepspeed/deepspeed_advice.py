"""The questions of `drivetrain config` about ZeRO, with recommended answers; torch is not imported."""

from collections.abc import Mapping
from typing import Any


def ask_stage(known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask for ZeRO's stage, unless a given DeepSpeed configuration sets the stage."""
    if known.get("deepspeed.config") is not None:
        return None
    return {
        "value": 2,
        "why": "it divides gradients and optimizer states at the traffic of plain replicas",
        "text": "What does ZeRO divide over the ranks?",
        "choices": {
            1: "optimizer states",
            2: "optimizer states and gradients",
            3: "parameters too: the most memory saved, half as much traffic again",
            0: "nothing",
        },
    }


def ask_offload_optimizer(known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask where optimizer states are kept, if ZeRO's stage divides optimizer states."""
    if known.get("deepspeed.config") is not None or known.get("deepspeed.stage") == 0:
        return None
    places = {
        "none": "on the devices",
        "cpu": "in host memory, updated by the CPU",
        "nvme": "on a fast local disk",
    }
    if known.get("deepspeed.stage") != 3:
        del places["nvme"]
    return {
        "value": "none",
        "why": "the devices update fastest; offload what does not fit them",
        "text": "Where are optimizer states kept?",
        "choices": places,
    }


def ask_offload_param(known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask where parameters are kept in stage 3."""
    if known.get("deepspeed.config") is not None or known.get("deepspeed.stage") != 3:
        return None
    return {
        "value": "none",
        "why": "the devices are fastest; offload what does not fit them",
        "text": "Where are parameters kept between their uses?",
        "choices": {"none": "on the devices", "cpu": "in host memory", "nvme": "on a fast local disk"},
    }


def ask_nvme_path(known: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Ask for the folder of optimizer states and parameters that are offloaded to a disk."""
    offloaded = (known.get("deepspeed.offload_optimizer"), known.get("deepspeed.offload_param"))
    if "nvme" not in offloaded:
        return None
    return {
        "value": "/local_nvme",
        "why": "where many clusters mount the local disk of a node",
        "text": "Folder on the fast local disk?",
    }
