"""Step 2 of the training: the text model learns to answer, from the features of a pool of pictures."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from benchmarks.demo_model.architecture import HIDDEN
from benchmarks.demo_model.optimiser import Optimiser
from benchmarks.demo_model.pictures import COLOURS, DIGITS, MAX_SIDE, SHAPES, Content
from benchmarks.demo_model.questions import MAX_PICTURES, TRAINING_STREAM, draw_contents
from benchmarks.demo_model.trees import IGNORED, EncodedPicture, TreeBatch, cached_encode, grow_tree, stack_trees
from benchmarks.demo_model.vision_training import Grid, draw_for_grid, encode, patches_of, training_grid


@dataclass(frozen=True)
class TextPlan:
    """How long and how hard the text model trains."""

    steps: int = 1000
    pool: int = 6000  # pictures whose features are kept
    trees: int = 24  # a step
    groups: int = 3  # the trees of a step, sorted by length, go through the model in so many parts
    branches: int = 8
    small_tokens: int = 6  # pictures of at most so many tokens ...
    small_share: float = 0.5  # ... are all there is in this share of the steps
    peak_rate: float = 2e-3
    others_share: float = 0.5
    warm_up: int = 60
    probe_weight: float = 0.5  # of the probes' loss, down to nothing at `probe_share` of the steps
    probe_share: float = 0.7
    noise: float = 0.02  # deviation of the noise on the features


def fill_text(model: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer) -> None:
    """Start values: variants of a word near each other, equal words that attend to each other, values copied out."""
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        nn.init.normal_(table, std=HIDDEN**-0.5)
        for token in range(len(tokenizer)):
            word = tokenizer.decode([token])
            bare = tokenizer.convert_tokens_to_ids(word.strip().lower())
            if word.strip().isalpha() and bare is not None and bare != token:
                table[token] = 0.9 * table[bare] + 0.44 * table[token]
        for layer in model.model.language_model.layers:
            attention = layer.self_attn
            shared = attention.num_key_value_groups
            for projection in (attention.k_proj, attention.v_proj):
                nn.init.normal_(projection.weight, std=0.06)
            keys, values = (
                projection.weight.view(-1, attention.head_dim, HIDDEN).repeat_interleave(shared, 0).flatten(0, 1)
                for projection in (attention.k_proj, attention.v_proj)
            )
            attention.q_proj.weight.copy_(keys + 0.02 * torch.randn(keys.shape))
            attention.o_proj.weight.copy_(values.T + 0.02 * torch.randn(values.T.shape))


def encode_pool(model: Qwen2_5_VLForConditionalGeneration, size: int, seed: Sequence[int]) -> list[EncodedPicture]:
    """Draws pictures of all sizes from `seed` and keeps their features."""
    rng = np.random.default_rng([TRAINING_STREAM, *seed])
    by_grid: dict[Grid, list[Content]] = defaultdict(list)
    for content in draw_contents(rng, size, held_out_share=0.0):
        by_grid[training_grid(rng, MAX_SIDE)].append(content)
    pool: list[EncodedPicture] = []
    for grid, contents in by_grid.items():
        for start in range(0, len(contents), 32):
            part = contents[start : start + 32]
            with torch.no_grad():
                patches = patches_of([draw_for_grid(rng, content, grid) for content in part])
                features = encode(model.model.visual, patches, grid)
            pool += [EncodedPicture(content, grid, one) for content, one in zip(part, features, strict=True)]
    return pool


CLASSES = {  # what the probes tell apart, by the names of a question's slots: "i" is a picture's number
    "i": tuple(str(number + 1) for number in range(MAX_PICTURES)),
    "shape": tuple(SHAPES),
    "colour": tuple(COLOURS),
    "digit": DIGITS,
}


class Probes(nn.Module):
    """Throwaway heads after the second layer. Without them, training long stays at answers about a random picture.

    At each picture's end: its number and what it shows. Where an answer's words are foretold: the number, shape, colour
    or digit that the question names, said by the same heads, so that both come to hold it in the same directions.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({name: nn.Linear(HIDDEN, len(classes)) for name, classes in CLASSES.items()})
        self._hidden: Tensor | None = None
        self._hook = layer.register_forward_hook(self._keep)

    def close(self) -> None:
        """Leaves the layer as it was."""
        self._hook.remove()

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | tuple[Tensor, ...]) -> None:
        self._hidden = output if isinstance(output, Tensor) else output[0]

    def loss(self, batch: TreeBatch) -> Tensor:
        """Mean cross entropy of the heads for the batch that has just gone through the layer."""
        assert self._hidden is not None
        ends = functional.rms_norm(self._hidden[batch.picture_ends], (HIDDEN,))
        words = functional.rms_norm(self._hidden[batch.asked], (HIDDEN,))
        losses = []
        for name, classes in CLASSES.items():
            shown = [classes.index(getattr(content, name)) for content in batch.contents] if name != "i" else None
            labels = batch.numbers if shown is None else torch.tensor(shown)
            losses.append(functional.cross_entropy(self.heads[name](ends), labels))
            named = [classes.index(asked.slots[name]) if name in asked.slots else IGNORED for asked in batch.asks]
            if set(named) != {IGNORED}:
                said = self.heads[name](words)
                losses.append(functional.cross_entropy(said, torch.tensor(named), ignore_index=IGNORED))
        return torch.stack(losses).mean()


def answer_loss(
    model: Qwen2_5_VLForConditionalGeneration, batch: TreeBatch, noise: float
) -> tuple[Tensor, Tensor, float]:
    """Summed weighted cross entropy of the answers' tokens, the weights' sum, and the share of them said rightly."""
    embeds = model.get_input_embeddings()(batch.ids)
    places = batch.ids == model.config.image_token_id
    if places.any():
        features = batch.features + noise * torch.randn_like(batch.features)
        embeds = embeds.masked_scatter(places[..., None], features)
    hidden = model.model.language_model(
        inputs_embeds=embeds,
        position_ids=batch.positions,
        attention_mask={"full_attention": batch.mask},
        use_cache=False,
    ).last_hidden_state
    rows, columns = (batch.labels != IGNORED).nonzero(as_tuple=True)
    logits = model.lm_head(hidden[rows, columns - 1])  # the token before is always of the same branch
    labels, weights = batch.labels[rows, columns], batch.weights[rows, columns]
    losses = functional.cross_entropy(logits, labels, reduction="none")
    return (losses * weights).sum(), weights.sum(), float((logits.argmax(-1) == labels).float().mean())


def train_text(
    model: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
    pool: Sequence[EncodedPicture],
    plan: TextPlan,
    seed: Sequence[int],
    say: Callable[[str], None],
) -> None:
    """Trains the text model in place on conversations drawn from `seed`; the ViT is not touched."""
    rng = np.random.default_rng([TRAINING_STREAM, *seed])
    probes = Probes(model.model.language_model.layers[1])
    text = model.model.language_model
    optimiser = Optimiser(text, plan.peak_rate, plan.steps, plan.warm_up, [probes], plan.others_share)
    write = cached_encode(tokenizer)
    small = [picture for picture in pool if len(picture.features) <= plan.small_tokens]
    started = time.perf_counter()
    for step in range(plan.steps):
        pictures = small if step < plan.small_share * plan.steps else pool
        trees = [grow_tree(rng, write, model.config.image_token_id, pictures, plan.branches) for _ in range(plan.trees)]
        trees.sort(key=lambda tree: len(tree.ids))
        total = sum(sum(tree.weights) for tree in trees)
        probe_weight = plan.probe_weight * max(0.0, 1.0 - step / (plan.probe_share * plan.steps))
        said, shares = 0.0, []
        for part in np.array_split(np.arange(plan.trees), plan.groups):
            batch = stack_trees([trees[number] for number in part], HIDDEN)
            summed, _, share = answer_loss(model, batch, plan.noise)
            loss = summed / total
            if probe_weight > 0.0 and batch.contents:
                loss = loss + probe_weight * probes.loss(batch) / plan.groups
            loss.backward()
            said += summed.item() / total
            shares.append(share)
        optimiser.step()
        if step % 50 == 0 or step == plan.steps - 1:
            seconds = time.perf_counter() - started
            say(f"text step {step} loss {said:.4f} tokens right {np.mean(shares):.4f} {seconds:.0f} s")
    probes.close()
