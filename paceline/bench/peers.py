"""Other people's generation loops on the same weights, in the same process, timed by the same clock.

A peer gets its own copy of the model, loaded as `transformers` loads it: none of our kernels, none of our caches. Its
forward therefore rounds differently from ours in half precision, and its text may part from ours at a near-tie.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.bench.measure import Answer, Clock, Engine
from paceline.bench.records import Settings
from paceline.errors import BadRequest, nearest

NOTE = "peers' forwards round differently"
PEERS: dict[str, dict[str, Any]] = {
    "transformers": {},
    "transformers-lookup-10": {"prompt_lookup_num_tokens": 10},
    "transformers-lookup-23": {"prompt_lookup_num_tokens": 23},
    "transformers-assisted": {},
}
"""Name of each peer and the settings that make it; the assisted one drafts with the model of method draft_model."""
ASSISTED = "transformers-assisted"


def check(names: Sequence[str]) -> None:
    """Refuse an unknown peer before anything is loaded."""
    for name in names:
        if name not in PEERS:
            raise BadRequest(f"unknown peer {name!r}{nearest(name, PEERS)} (peers: {', '.join(PEERS)})")


@dataclass
class Peer:
    """``model.generate`` with the arguments of one peer, batch 1, sampling from the same law as the methods.

    The model's own sampling defaults (top-k, repetition penalty and the like) are set aside, its EOS ids are honoured.
    `passes` counts the model's forwards, the one that reads the prompt included, since that one also gives a token.
    """

    name: str
    model: Any
    tokenizer: Any
    settings: Settings
    clock: Clock = time.perf_counter
    kind: str = "peer"
    assistant: Any = None
    """The draft model, as `transformers` loads it."""

    def answer(self, prompt_ids: list[int], seed: int) -> Answer:
        """Generate after ``prompt_ids``; the new ids are those beyond the prompt."""
        import torch

        device = self.model.device
        ids = torch.tensor([prompt_ids], device=device)
        calls = [0]

        def count(*_: Any) -> None:
            calls[0] += 1

        hook = self.model.register_forward_pre_hook(count)
        try:
            with torch.random.fork_rng(), torch.inference_mode():
                torch.manual_seed(seed)
                start = self.clock()
                own = {"attention_mask": torch.ones_like(ids), "generation_config": self._config()}
                if self.assistant is not None:
                    own["assistant_model"] = self.assistant
                out = self.model.generate(ids, **own)
                new = until_stop(out[0, len(prompt_ids) :].tolist(), self.model.generation_config.eos_token_id)
                seconds = self.clock() - start
        finally:
            hook.remove()
        text = str(self.tokenizer.decode(new, skip_special_tokens=True))
        return Answer(new, text, seconds, calls[0])

    def _config(self) -> Any:
        from transformers import GenerationConfig

        sampling: dict[str, Any] = {"do_sample": False}
        if self.settings.temperature >= 1e-5:
            sampling = {"do_sample": True, "temperature": self.settings.temperature, "top_k": 0, "top_p": 1.0}
        make: Any = GenerationConfig
        return make(max_new_tokens=self.settings.max_tokens, **sampling, **PEERS[self.name])


def load(names: Sequence[str], llm: Engine, settings: Settings) -> list[Peer]:
    """The named peers, all on one unmodified copy of the model that ``llm`` runs."""
    check(names)
    if not names:
        return []
    if ASSISTED in names:
        draft_of(settings)
    from paceline import models

    options = {key: settings.load[key] for key in ("dtype", "device") if key in settings.load}
    model = models.load_model(llm.source, **options)
    stops_only(model, llm.eos_ids)
    assistant = None
    if ASSISTED in names:
        assistant = models.load_model(models.resolve(draft_of(settings)), **options)
        stops_only(assistant, llm.eos_ids)
    return [
        Peer(name, model, llm.tokenizer, settings, assistant=assistant if name == ASSISTED else None) for name in names
    ]


def draft_of(settings: Settings) -> str:
    """The draft model that the measured method draft_model uses."""
    for config in settings.methods.values():
        if config.get("method") == "draft_model" and config.get("model"):
            return str(config["model"])
    raise BadRequest(f"{ASSISTED} needs a draft model: add draft_model to --methods, and --draft-model NAME")


def until_stop(ids: list[int], eos: int | list[int] | None) -> list[int]:
    """``ids`` up to and with the first EOS: what a loop that drafts leaves behind it is no part of the answer."""
    stops = {eos} if isinstance(eos, int) else set(eos or ())
    return next((ids[: i + 1] for i, token in enumerate(ids) if token in stops), ids)


def stops_only(model: Any, eos_ids: Iterable[int]) -> None:
    """Replace the model's generation defaults by ``eos_ids`` alone, so every contender draws from the same law."""
    from transformers import GenerationConfig

    make: Any = GenerationConfig
    stops = sorted(eos_ids)
    model.generation_config = make(eos_token_id=stops or None, pad_token_id=stops[0] if stops else None)
