"""The trainer: data, steps, checkpoints, and after every epoch what drafting with the head brings.

Nothing depends on when a run was cut short: orders and noise come from the seed, the epoch and the step, and a
checkpoint holds weights and moments as they are. So a training that was killed and went on ends with the same head as
one that was not.

In the folder of a head lie recipe.json, metrics.jsonl, training.png, README.md, and config.json and weights of the head
that drafts best so far; in a folder below it, data and checkpoint, which are of no use once the training has ended.
"""

import fcntl
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from paceline.decode import run
from paceline.draft import SpeculativeConfig
from paceline.draft.base import Drafter
from paceline.draft.eagle import Eagle, Network
from paceline.draft.losses import Batch, Mix
from paceline.draft.medusa import Heads, Medusa
from paceline.errors import BadRequest, CorruptWeights, PacelineError
from paceline.files import sweep, whole, write_atomically
from paceline.formats import Head, read_head
from paceline.formats.export import export
from paceline.formats.head import MedusaSettings
from paceline.kernels.machine import identity
from paceline.output import Stats, combined
from paceline.progress import human
from paceline.sampling import SamplingParams
from paceline.train import report
from paceline.train.data import HELD_OUT, LOCK, Folder, Plan, Seen, Texts, batches, commonest, make_all, room
from paceline.train.estimate import data_bytes
from paceline.train.fresh import fresh, taps_of
from paceline.train.recipe import Recipe, seed_of
from paceline.train.world import World

SAVE_EVERY = 300.0
"""Seconds between checkpoints within an epoch. When they fall changes nothing but what a kill costs."""
MOST_SKIPPED = 10
"""Steps in a row whose gradients are no numbers, after which a training gives up."""
BETAS = 0.9, 0.95
"""Of AdamW, as EAGLE's authors have them."""
LONGEST = 64
"""Tokens that are drafted for each held-out question."""
DEPTH = 6
"""Longest draft when a head is measured: a chain, all of it verified."""

Tick = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Outcome:
    """What a training came to."""

    folder: Path
    is_finished: bool
    """False where it was asked to stop before the end; the same call goes on."""
    epochs: int
    """That were finished."""
    acceptance_length: float | None
    """Of the best head so far, on the held-out questions."""


def train(
    llm: Any,
    recipe: Recipe,
    folder: Path,
    *,
    data_folder: Path | None = None,
    minutes: float | None = None,
    progress: Tick = lambda stage, done, total: None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train a head, or go on with one: make the data that is missing, train, measure, keep the best.

    Args:
        llm: the target.
        folder: where the head goes.
        data_folder: where the data lie, so that several heads learn from the same; None is below `folder`.
        minutes: stop after about so long, between two steps or groups; the same call goes on.
        progress: takes (stage, steps done, steps in all).
        say: takes a line for the reader.

    Raises:
        BadRequest: the recipe, the data or the folder are of no use for this, or others train in it.
        PacelineError: the disk is full, or the gradients are no numbers any more; what was reached is kept.
    """
    end = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
    if recipe.data != "self":
        recipe = replace(recipe, data_sha256=_hash(Path(recipe.data)))
    data_folder = data_folder or folder / "work" / "data"
    check_folder(folder, recipe, data_folder)
    if recipe.init is not None:
        read_head(recipe.init)  # before hours of data, not behind them
    training = _Training(llm, recipe, folder, data_folder, end, progress, say)
    try:
        with _lock(folder / "work", training.world):
            sweep(
                folder, "recipe.json", "config.json", "model.safetensors", "metrics.jsonl", "training.png", "README.md"
            )
            sweep(folder / "work", training.checkpoint.name)
            return training.run()
    except OSError as error:
        raise PacelineError(
            f"cannot go on in {folder}: {error}; what was reached is kept: mend that and run the same command again"
        ) from error


def _hash(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BadRequest(f"cannot read the data {path}: {error.strerror or error}") from error


@contextmanager
def _lock(folder: Path, world: World) -> Iterator[None]:
    """A folder for this process and those that work with it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a")
    except OSError as error:
        raise BadRequest(f"cannot write to {folder}: {error.strerror or error}; give another folder") from error
    with file:
        if world.is_main:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise BadRequest(f"another training runs in {folder}; wait for it, or give another folder") from error
        yield


def check_folder(folder: Path, recipe: Recipe, data_folder: Path) -> None:
    """Passes for a folder that is new, or holds a training by the same recipe.

    Raises:
        BadRequest: it holds something else.
    """
    path = folder / "recipe.json"
    if path.exists():
        if different := recipe.different(Recipe.read(path)):
            raise BadRequest(
                f"{folder} holds a training by another recipe ({'; '.join(different)}); give the same one to go on "
                "with it, or another folder"
            )
        return
    if folder.exists() and not folder.is_dir():
        raise BadRequest(f"{folder} is a file; a head is written to a folder: give another name")
    ours = ("work", *([data_folder.name] if data_folder.parent == folder else []))
    others = sorted(file.name for file in folder.iterdir() if file.name not in ours) if folder.exists() else []
    others = [name for name in others if not name.startswith(".recipe.json.")]
    if others:
        raise BadRequest(
            f"{folder} holds other things ({', '.join(others[:4])}); give a new folder, or one of a "
            "training to go on with"
        )


@dataclass
class _Progress:
    """Where a training stands; all of it is in the checkpoint."""

    step: int = 0
    epoch: int = 0
    best: float = 0.0
    num_skipped: int = 0
    """Steps without numbers, in a row."""


class _Training:
    def __init__(
        self,
        llm: Any,
        recipe: Recipe,
        folder: Path,
        data_folder: Path,
        end: float,
        tick: Tick,
        say: Callable[[str], None],
    ) -> None:
        self.llm, self.recipe, self.folder, self.end = llm, recipe, folder, end
        self.world = World()
        self.tick: Tick = tick if self.world.is_main else lambda stage, done, total: None
        self.say = say if self.world.is_main else lambda text: None
        self.data, self.checkpoint = Folder(data_folder), folder / "work" / "checkpoint.safetensors"
        self.at = _Progress()

    def run(self) -> Outcome:
        """See `train`."""
        taps = taps_of(self.recipe, self.llm.target)
        self.last = int(self.llm.target.num_layers)
        plan = Plan.of(self.llm, self.recipe, sorted({*taps, self.last}))
        with _lock(self.data.path, self.world) if self.data.path.parent != self.folder / "work" else nullcontext():
            if not self._made(plan):
                return Outcome(self.folder, False, 0, None)
        seen = Seen()
        held, texts = Texts(self.data.path, [HELD_OUT], seen), Texts(self.data.path, plan.names[1:], seen)
        self._check_texts(held, texts)
        self.taps, self.texts, self.held = taps, texts, held
        self._begin()
        return self._epochs()

    def _made(self, plan: Plan) -> bool:
        """All groups are there; False where it was time to stop before."""
        if self.world.is_main:
            self.data.open(self.recipe, plan.taps, self.llm.target)
            sweep(self.data.path, "about.json", "*.safetensors")
        self.world.wait()
        plan = replace(plan, taps=self.data.open(self.recipe, plan.taps, self.llm.target))
        if self.world.is_main:
            self._check_room(plan)
            self.recipe.write(self.folder / "recipe.json")
        is_made = make_all(
            self.llm, plan, self.data, plan.names[self.world.rank :: self.world.size], self.tick, self._is_late
        )
        late = self.world.any(not is_made)
        self.world.wait()
        return not late

    # -- before the first step ---------------------------------------------------------------------------------

    def _check_room(self, plan: Plan) -> None:
        missing = sum(plan.count(name) for name in plan.names if not self.data.has(name))
        total = sum(plan.count(name) for name in plan.names)
        if not missing:
            return
        size, free = int(missing / total * data_bytes(self.llm, plan)), room(self.data.path)
        self.say(f"data: up to {human(size)} for {missing} texts in {self.data.path}")
        if size > free:
            raise BadRequest(
                f"the data may take up to {human(size)}, and {human(free)} are free in {self.data.path}; make room, "
                "give another folder for the data, or ask for fewer or shorter texts"
            )

    def _check_texts(self, held: Texts, texts: Texts) -> None:
        if not len(texts) or not texts.num_learnt:
            raise BadRequest(
                "there is nothing to learn: no answer could be used, or all questions are nearly those held out"
            )
        if not len(held):
            raise BadRequest("there is nothing to measure on: no held-out question could be used")
        dropped = f", {texts.num_dropped} dropped that were nearly the same as others" if texts.num_dropped else ""
        self.say(
            f"{len(texts)} texts of {sum(texts.lengths):,} tokens, of which {texts.num_learnt:,} are answers and learnt"
            f"{dropped}; {len(held)} more are held out to measure on"
        )

    def _ids(self) -> Int64[Tensor, "Vd"] | None:
        size, every = self.recipe.draft_vocab_size, int(self.llm.target.vocab_size)
        if size is None or size >= every or self.recipe.method == "eagle":
            return None
        counts = self.texts.counts()
        ids = commonest(counts, size, sorted(self.llm.eos_ids), every)
        covered = sum(counts[i] for i in ids.tolist()) / max(1, sum(counts.values()))
        self.say(f"the head scores {size:,} of {every:,} ids, which are {covered:.1%} of what is learnt")
        return ids

    def _begin(self) -> None:
        """The head, its optimiser, and where a checkpoint left them."""
        recipe, target = self.recipe, self.llm.target
        dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        head = fresh(replace(recipe, init=None) if self.checkpoint.exists() else recipe, target, self._ids(), dtype)
        saved = self._saved(head)
        if saved is not None:
            head = replace(
                head, tensors={name: saved[f"head.{name}"].to(target.device, copy=True) for name in head.tensors}
            )
        self.head = head
        self.drafter, self.parameters = learner(head, target, dtype)
        self.optimiser = torch.optim.AdamW(
            list(self.parameters.values()), recipe.learning_rate, BETAS, weight_decay=recipe.weight_decay
        )
        if saved is not None:
            self._restore(saved)
        bf16 = recipe.bfloat16
        self.bf16 = (target.dtype == torch.bfloat16) if bf16 is None else bf16
        weights = sum(p.numel() for p in self.parameters.values())
        self.say(f"{weights / 1e6:.1f} million weights to train, {human(4 * 4 * weights)} with gradients and moments")

    def _epochs(self) -> Outcome:
        recipe = self.recipe
        per_epoch = self._steps_of(0)
        total = per_epoch * recipe.epochs
        if not self.at.step and self.world.is_main:
            self._measure(0)
        saved_at = time.monotonic()
        while self.at.epoch < recipe.epochs:
            order = batches(self.texts.lengths, recipe.batch_tokens, recipe.seed, self.at.epoch)
            steps = [order[i : i + recipe.accumulate] for i in range(0, len(order), recipe.accumulate)]
            begin = sum(self._steps_of(epoch) for epoch in range(self.at.epoch))
            for number in range(self.at.step - begin, len(steps)):
                if self.world.any(self._is_late()):
                    self._save()
                    return Outcome(self.folder, False, self.at.epoch, self.at.best or None)
                self._step(steps[number], total)
                self.tick("training", self.at.step, total)
                if time.monotonic() - saved_at > SAVE_EVERY:
                    self._save()
                    saved_at = time.monotonic()
            self._save()  # measuring takes its time, and a stop in the middle of it is no reason to train again
            self.at.epoch += 1
            if self.world.is_main:
                self._measure(self.at.epoch)
            self._save()
            self.world.wait()
        if self.world.is_main:
            report.plot(self.folder / "metrics.jsonl", self.folder / "training.png")
        return Outcome(self.folder, True, self.at.epoch, self.at.best or None)

    def _steps_of(self, epoch: int) -> int:
        count = len(batches(self.texts.lengths, self.recipe.batch_tokens, self.recipe.seed, epoch))
        return -(-count // self.recipe.accumulate)

    def _is_late(self) -> bool:
        return time.monotonic() > self.end

    # -- a step ------------------------------------------------------------------------------------------------

    def _step(self, lots: Sequence[Sequence[int]], total: int) -> None:
        """Gradients of some batches together, as one step."""
        at, recipe, rate = self.at, self.recipe, self._rate(total)
        self.optimiser.zero_grad(set_to_none=False)
        sums = torch.zeros(3, dtype=torch.float64, device=self.llm.target.device)  # loss, places, right
        for i, numbers in enumerate(lots):
            if i % self.world.size != self.world.rank:
                continue
            batch = self.texts.batch(numbers, self.taps, self.last, self.llm.target.device)
            with self._precision():
                loss, notes = self._loss(self._noisy(batch, i))
            places = notes.get("places_0", 0.0)
            if not places:
                continue
            (loss * places).backward()
            found = [float(loss.detach()) * places, places, notes["right_0"]]
            sums += torch.tensor(found, dtype=torch.float64, device=sums.device)
        parameters = list(self.parameters.values())
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.world.add_up([sums, *(p.grad for p in parameters if p.grad is not None)])
        loss, places, right = sums.tolist()
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad /= max(1.0, places)
        size = float(nn.utils.clip_grad_norm_(parameters, recipe.clip))
        at.step += 1
        if not math.isfinite(size) or not math.isfinite(loss):
            self._skip()
            return
        at.num_skipped = 0
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        if self.world.is_main and places:
            shares = {"loss": loss / places, "right_0": right / places}
            self._log({"step": at.step, "epoch": at.epoch} | shares | {"gradient": size, "learning_rate": rate})

    def _loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        mix, decay = Mix.read(self.recipe.loss), self.recipe.decay
        if isinstance(self.drafter, Medusa):
            return self.drafter.loss(batch, mix=mix, decay=decay)
        return self.drafter.loss(batch, mix=mix, decay=decay, steps=self.recipe.steps)

    def _noisy(self, batch: Batch, i: int) -> Batch:
        if self.recipe.method != "eagle" or not self.recipe.noise:
            return batch
        generator = torch.Generator().manual_seed(seed_of(self.recipe.seed, "noise", self.at.step, i))
        noise = torch.rand(batch.hidden.shape, generator=generator, dtype=torch.float64) - 0.5
        return batch._replace(hidden=batch.hidden + (self.recipe.noise * noise).to(batch.hidden))

    def _precision(self) -> Any:
        if not self.bf16:
            return nullcontext()
        return torch.autocast(self.llm.target.device.type, torch.bfloat16)

    def _rate(self, total: int) -> float:
        """Up in a line, then down along a cosine."""
        warm = max(1, round(self.recipe.warm_up * total))
        if self.at.step < warm:
            return self.recipe.learning_rate * (self.at.step + 1) / warm
        done = (self.at.step - warm) / max(1, total - warm)
        return self.recipe.learning_rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))

    def _skip(self) -> None:
        self.at.num_skipped += 1
        self.say(f"step {self.at.step}: the gradients are no numbers; the step is left out")
        if self.world.is_main:
            self._log({"step": self.at.step, "epoch": self.at.epoch, "skipped": True})
        if self.at.num_skipped >= MOST_SKIPPED:
            raise PacelineError(
                f"the gradients of {MOST_SKIPPED} steps in a row are no numbers; the last checkpoint and the best head "
                "are kept. Try a lower learning rate in a new folder"
            )

    # -- measuring ---------------------------------------------------------------------------------------------

    def _measure(self, epoch: int) -> None:
        """What the head says of held-out texts, and what it brings when it drafts; the best one so far is kept."""
        self.tick("measuring", 0, 1)
        total, sums = 0.0, dict[str, float]()
        with torch.no_grad(), self._precision():
            for numbers in batches(self.held.lengths, self.recipe.batch_tokens, 0, 0):
                loss, notes = self._loss(self.held.batch(numbers, self.taps, self.last, self.llm.target.device))
                total += float(loss) * notes.get("places_0", 0.0)
                sums = {key: sums.get(key, 0.0) + notes.get(key, 0.0) for key in sums | notes}
        said = {"loss": total / max(1.0, sums.get("places_0", 0.0))}
        said |= {key: sums[key] / max(1.0, sums[f"learnt_{key[6:]}"]) for key in sums if key.startswith("right_")}
        stats = measure(
            self.llm, self._as_it_drafts(), [self.held.prompt(i) for i in range(len(self.held))], self.recipe
        )
        length, kept = stats.mean_acceptance_length, stats.acceptance_per_position_conditional
        self.say(
            f"epoch {epoch}: {length:.2f} tokens per pass on held-out questions; the first guess is right in "
            f"{said.get('right_0', 0.0):.1%} of their tokens"
        )
        self._log({"step": self.at.step, "epoch": epoch, "held_out": said, "acceptance_length": length, "kept": kept})
        self.tick("measuring", 1, 1)
        if epoch and length > self.at.best:
            self.at.best = length
            self._write_head()

    def _as_it_drafts(self) -> Drafter[Any]:
        """The head in the target's dtype, as whoever loads it has it."""
        tensors = {
            name: t.detach().to(self.llm.target.dtype) if t.is_floating_point() else t
            for name, t in self.head.tensors.items()
        }
        return chain_of(replace(self.head, tensors=tensors))

    def _write_head(self) -> None:
        tensors = {
            name: t.detach().to(self.llm.target.dtype).cpu() if t.is_floating_point() else t.cpu()
            for name, t in self.head.tensors.items()
        }
        layout: Any = "vllm-medusa" if self.head.kind == "medusa" else "eagle"
        weights, config = export(replace(self.head, tensors=tensors), layout)
        _save_file(self.folder / "model.safetensors", {k: t.contiguous() for k, t in weights.items()}, {"format": "pt"})
        write_atomically(self.folder / "config.json", json.dumps(config, indent=2) + "\n")  # last: now it is a head
        report.card(self.folder / "README.md", self.recipe, self.at.best, len(self.texts), self.texts.num_learnt)

    # -- checkpoints and notes ---------------------------------------------------------------------------------

    def _save(self) -> None:
        if not self.world.is_main:
            return
        tensors = {f"head.{name}": tensor.detach().cpu() for name, tensor in self.head.tensors.items()}
        for name, parameter in self.parameters.items():
            moments = self.optimiser.state.get(parameter, {})
            for key in ("exp_avg", "exp_avg_sq", "step"):
                if key in moments:
                    tensors[f"{key}.{name}"] = moments[key].detach().cpu()
        _save_file(
            self.checkpoint,
            tensors,
            {"at": json.dumps(vars(self.at)), "target": identity(self.llm.target), "recipe": self._recipe_text()},
        )

    def _saved(self, head: Head) -> dict[str, Tensor] | None:
        if not self.checkpoint.exists():
            self._cut_notes(0)
            return None
        try:
            opened: Any = safe_open(self.checkpoint, "pt")
            with opened as file:
                about = file.metadata() or {}
                self.at, whose = _Progress(**json.loads(about["at"])), (about["target"], about["recipe"])
                found = {name: file.get_tensor(name) for name in list(file.keys())}
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise CorruptWeights(
                f"{self.checkpoint} cannot be read ({error}); delete it to train again from the data, or take a "
                "new folder"
            ) from error
        shapes = {name.removeprefix("head."): t.shape for name, t in found.items() if name.startswith("head.")}
        if whose != (identity(self.llm.target), self._recipe_text()) or shapes != {
            name: t.shape for name, t in head.tensors.items()
        }:
            raise BadRequest(
                f"{self.checkpoint} is of a training by another recipe, or for another target or dtype; take a new "
                "folder, or delete it to begin anew"
            )
        self._cut_notes(self.at.step)
        return found

    def _recipe_text(self) -> str:
        return json.dumps(self.recipe.to_dict(), sort_keys=True)

    def _restore(self, saved: dict[str, Tensor]) -> None:
        for name, parameter in self.parameters.items():
            keys = ("exp_avg", "exp_avg_sq", "step")
            if f"step.{name}" in saved:
                own = {key: saved[f"{key}.{name}"].clone() for key in keys}
                self.optimiser.state[parameter] = {
                    key: t if key == "step" else t.to(parameter.device) for key, t in own.items()
                }

    def _log(self, values: dict[str, Any]) -> None:
        with (self.folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")

    def _cut_notes(self, step: int) -> None:
        """Take out what was noted behind the checkpoint: it comes again."""
        path = self.folder / "metrics.jsonl"
        if not self.world.is_main or not path.exists():
            return
        kept = [
            line
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
            if step and self._is_before(line)
        ]
        write_atomically(path, "".join(f"{line}\n" for line in kept))

    def _is_before(self, line: str) -> bool:
        """Whether a note is of what the checkpoint holds; one that was cut short by a kill is not."""
        try:
            note = json.loads(line)
            return note["step"] <= self.at.step and not ("acceptance_length" in note and note["epoch"] > self.at.epoch)
        except (ValueError, KeyError, TypeError):
            return False


def _save_file(path: Path, tensors: dict[str, Tensor], about: dict[str, str]) -> None:
    size = sum(tensor.nbytes for tensor in tensors.values())
    try:
        with whole(path) as file:
            save_file(tensors, file.name, metadata=about)
    except (OSError, SafetensorError) as error:
        raise PacelineError(
            f"cannot write {path} ({human(size)}, {human(room(path.parent))} are free): {error}; what was written "
            "before is kept: make room and run the same command again"
        ) from error


def learner(head: Head, target: Any, dtype: torch.dtype) -> tuple[Medusa | Eagle, dict[str, nn.Parameter]]:
    """A drafter that learns, and its weights by their names in the head, whose own tensors they are."""
    drafter = Medusa(head) if head.kind == "medusa" else Eagle(head)
    drafter.bind(target)
    module: nn.Module
    if isinstance(drafter, Medusa):
        module = drafter.heads = Heads(head, target, dtype)
    else:
        module = drafter.network = Network(head, target, dtype)
    places = {parameter.data_ptr(): parameter for parameter in module.parameters()}
    found = {name: places[t.data_ptr()] for name, t in head.tensors.items() if t.is_floating_point()}
    for parameter in found.values():
        parameter.requires_grad_(True)
    return drafter, found


def chain_of(head: Head) -> Medusa | Eagle:
    """A drafter that guesses a chain and nothing beside it."""
    if isinstance(head.settings, MedusaSettings):
        return Medusa(head, tree_top_k=1, choices=[[0] * deep for deep in range(1, 1 + head.settings.num_heads)])
    return Eagle(head, tree_top_k=1, depth=DEPTH)


def measure(llm: Any, drafter: Drafter[Any], prompts: Sequence[list[int]], recipe: Recipe) -> Stats:
    """Greedy answers with a head, every guess verified: what became of them, over all prompts."""
    drafter.bind(llm.target)
    params = [
        SamplingParams(temperature=0.0, max_tokens=min(recipe.max_tokens, LONGEST, llm.max_model_len - len(prompt)))
        for prompt in prompts
    ]
    requests = llm.requests(list(prompts), params, SpeculativeConfig(method=drafter), drafter, None)
    for _ in run(llm.target, requests, max_rows=4):
        pass
    return combined([request.stats for request in requests])
