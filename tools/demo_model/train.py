"""Makes the demo model from a seed: corpus, tokenizer, training, files. Takes an hour or more on two cores.

    make demo-model ARGS=OUT_DIR

The tokenizer is the same on every machine. The weights differ in their last bits, because threads add in another
order, but the figures of `evaluate.py` agree to about 2 %.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo_model.corpus import FIRST_MIX, SECOND_MIX, THIRD_MIX, documents
from demo_model.lexicon import EMOJI
from demo_model.tool_corpus import ToolMix, documents_with_tools

SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
BOS, EOS, SYSTEM, USER = 1, 2, 3, 4
CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class TrainingStage:
    """`phases` are (length of a row in tokens, rows in a batch, tokens in all). The learning rate warms up, stays at
    its peak until `decay_from`, and then falls linearly to `end` of the peak. `tools`: None for texts of
    corpus.py alone. `question_weight`: see `loss_of`.
    """

    mix: tuple[int, ...]
    peak: float
    decay_from: float
    end: float
    phases: tuple[tuple[int, int, int], ...]
    tools: ToolMix | None = None
    question_weight: float = 1.0

    @property
    def tokens(self) -> int:
        return sum(tokens for _, _, tokens in self.phases)

    def learning_rate(self, progress: float) -> float:
        line = 1 - (1 - self.end) * (progress - self.decay_from) / (1 - self.decay_from)
        return self.peak * min(1.0, progress / 0.02, line)


# Short rows come first, then rows that hold a whole story. The second stage ends with rows of the whole context. The
# others bring texts with tools, beside those of the second one: first with many invented names, so that the model reads
# the list of tools; then with few, so that it learns the names of its tools by heart; then with more questions that no
# tool fits; last with sums of single digits, which are rare in the others.
STAGES = (
    TrainingStage(FIRST_MIX, 3e-3, 0.64, 0.17, ((256, 32, 6_000_000), (512, 16, 8_100_000))),
    TrainingStage(SECOND_MIX, 1.5e-3, 0.2, 0.02, ((512, 16, 4_000_000), (CONTEXT, 4, 1_000_000))),
    TrainingStage(
        mix=SECOND_MIX,
        peak=1.5e-3,
        decay_from=0.2,
        end=0.02,
        phases=((512, 8, 4_300_000),),
        tools=ToolMix(0.6, 0.5, 0.15),
        question_weight=0.0,
    ),
    TrainingStage(
        mix=SECOND_MIX,
        peak=1.5e-3,
        decay_from=0.4,
        end=1.0,
        phases=((512, 8, 1_650_000),),
        tools=ToolMix(0.6, 0.15, 0.25),
        question_weight=0.1,
    ),
    TrainingStage(
        mix=SECOND_MIX,
        peak=1.5e-3,
        decay_from=0.1,
        end=0.02,
        phases=((512, 8, 2_500_000),),
        tools=ToolMix(0.6, 0.15, 0.4),
        question_weight=0.1,
    ),
    TrainingStage(
        mix=THIRD_MIX,
        peak=6e-4,
        decay_from=0.1,
        end=0.02,
        phases=((512, 8, 600_000),),
        tools=ToolMix(0.4, 0.15, 0.4, 0.12),
        question_weight=0.1,
    ),
)
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE tokenizer with 2,048 entries. Digits are separate tokens, so that numbers can be added digit by
    digit.
    """
    bpe = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
    trainer = trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    without_emoji = str.maketrans(dict.fromkeys("".join(EMOJI.values()), ""))
    texts = (text.translate(without_emoji) for text in itertools.islice(documents(seed, FIRST_MIX), 20_000))
    bpe.train_from_iterator(texts, trainer)
    return bpe


def rows(tokenizer: Tokenizer, source: Iterator[str], length: int, count: int) -> torch.Tensor:
    """Training rows, int32 [count, length + 1]: documents one after the other. The last document of a row is cut
    off.
    """
    result = np.zeros((count, length + 1), dtype=np.int32)
    row, filled = 0, 0
    while row < count:
        for encoding in tokenizer.encode_batch(list(itertools.islice(source, 1000))):
            ids = encoding.ids[: length + 1 - filled]
            result[row, filled : filled + len(ids)] = ids
            filled += len(ids)
            if filled == length + 1:
                row, filled = row + 1, 0
                if row == count:
                    break
    return torch.from_numpy(result)


def loss_of(
    model: LlamaForCausalLM, ids: torch.Tensor, positions: torch.Tensor, question_weight: float = 1.0
) -> torch.Tensor:
    """Mean cross-entropy of the next token. Tokens of the system's and the user's messages count `question_weight`
    times: 1 where their repeated names teach the model to copy from earlier text, less where long lists of tools, drawn
    at random, would drown what a call teaches.
    """
    before, after = ids[:, :-1].long(), ids[:, 1:].flatten().long()
    hidden = model.model(before, position_ids=positions, use_cache=False).last_hidden_state
    logits = torch.nn.functional.linear(hidden, model.lm_head.weight).flatten(0, 1).float()
    if question_weight == 1.0:
        return torch.nn.functional.cross_entropy(logits, after)
    weights = torch.where(follows_question(before), question_weight, 1.0).flatten()
    losses = torch.nn.functional.cross_entropy(logits, after, reduction="none")
    return (losses * weights).sum() / weights.sum()


def follows_question(ids: torch.Tensor) -> torch.Tensor:
    """Whether the token after each token belongs to a message of the system or the user; bool, [rows, length] as
    `ids`.
    """
    position = torch.arange(ids.shape[1]).expand_as(ids)
    last_special = torch.where(ids < len(SPECIAL_TOKENS), position, 0).cummax(dim=1).values
    role = ids.gather(1, last_special)
    return (role == SYSTEM) | (role == USER)


def positions_of(ids: torch.Tensor, skipping: bool) -> torch.Tensor:
    """Positions 0, 1, 2, … for each row. With `skipping`, each row has one jump, which teaches distances and positions
    beyond the length of short rows (PoSE, https://arxiv.org/abs/2309.10400)."""
    count, length = ids.shape[0], ids.shape[1] - 1
    positions = torch.arange(length).expand(count, length)
    if not skipping:
        return positions
    where = torch.randint(0, length, (count, 1))
    jump = torch.randint(0, CONTEXT - length + 1, (count, 1))
    return positions + jump * (positions >= where)


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=5,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return LlamaForCausalLM(config)


def make_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for the embedding and the norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    return [
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int, stage: TrainingStage) -> None:
    optimizers = make_optimizers(model)
    source = documents(seed, stage.mix)
    if stage.tools:
        source = documents_with_tools(seed, stage.tools, stage.mix)
    done, started, smooth = 0, time.monotonic(), None
    for length, batch, tokens in stage.phases:
        data = rows(tokenizer, source, length, tokens // length // batch * batch)
        for step, ids in enumerate(torch.split(data, batch)):
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = stage.learning_rate(done / stage.tokens)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, ids, positions_of(ids, skipping=length == 512), stage.question_weight)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done += ids.shape[0] * length
            smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
            if step % 20 == 0:
                print(f"{done / 1e6:.2f} M tokens, {time.monotonic() - started:.0f} s, loss {smooth:.4f}", flush=True)


@torch.no_grad()
def held_out_perplexity(model: LlamaForCausalLM, tokenizer: Tokenizer, seed: int) -> float:
    data = rows(tokenizer, documents(seed + 100, held_out=True), 512, 128)
    losses = [loss_of(model, ids, positions_of(ids, skipping=False)).item() for ids in torch.split(data, 16)]
    return math.exp(sum(losses) / len(losses))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    rounded = make_model().to(torch.bfloat16)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, max_length=CONTEXT)
    rounded.save_pretrained(out)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", model_max_length=CONTEXT
    )
    fast.save_pretrained(out)
    config_file = out / "tokenizer_config.json"
    config = json.loads(config_file.read_text()) | {"chat_template": CHAT_TEMPLATE.read_text()}
    config_file.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", type=Path, help="a model that the stage before --first-stage has saved")
    parser.add_argument("--first-stage", type=int, default=1, choices=range(1, len(STAGES) + 1))
    args = parser.parse_args()
    if (args.first_stage > 1) != (args.weights is not None):
        parser.error("--first-stage after the first needs --weights, and --weights needs --first-stage")
    torch.manual_seed(args.seed)
    tokenizer = train_tokenizer(args.seed)
    model = make_model()
    if args.weights:
        model = LlamaForCausalLM.from_pretrained(args.weights, dtype=torch.float32)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    model.model.compile()
    started = time.monotonic()
    for number, stage in list(enumerate(STAGES, 1))[args.first_stage - 1 :]:
        train(model, tokenizer, args.seed + number, stage)
        save(model, tokenizer, args.out)
    minutes = (time.monotonic() - started) / 60
    print(f"{minutes:.0f} minutes, held-out perplexity {held_out_perplexity(model, tokenizer, args.seed):.3f}")


if __name__ == "__main__":
    main()
