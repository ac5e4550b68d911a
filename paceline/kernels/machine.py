"""What measured numbers belong to: the processor, and a model told by its shape and a sample of its weights."""

import hashlib
import json
import platform
from typing import Any

import torch


def machine_name() -> str:
    """The accelerator's or else the processor's name."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo") as file:
            line = next((line for line in file if line.startswith("model name")), "")
            return line.partition(":")[2].strip() or platform.processor()
    except OSError:
        return platform.processor()


def identity(target: Any) -> str:
    """A fingerprint of a model: its configuration, its size, and some of its weights."""
    samples = []
    for name, weight in sorted(target.model.state_dict().items()):
        flat = weight.flatten()  # a view; of weights that are mapped, two pages each are read
        samples.append(
            (name, [flat[i].item() for i in sorted({0, flat.numel() // 2, flat.numel() - 1}) if flat.numel()])
        )
    parts = [target.model.config.to_json_string(), target.weight_bytes, str(target.dtype), samples]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]
