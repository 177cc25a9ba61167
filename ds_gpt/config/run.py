"""The run YAML as types: what is learned. How it runs on the hardware belongs to the DeepSpeed JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from ds_gpt.config.parallel import ParallelConfig
from ds_gpt.config.section import Auto, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section
from ds_gpt.config.stage import ExamplesConfig, LoraConfig, ObjectiveConfig, PreferenceConfig, Stage


class ModelConfig(Section):
    """The shape of the GPT: GPT-2's, unless an option below says otherwise."""

    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    context: PositiveInt  # tokens; also the number of learned positions
    ffn_width: PositiveInt | Auto = "auto"  # auto: 4 x width; swiglu, which has a third matrix: 8/3 x width, up to a multiple of 64
    vocab_size: PositiveInt | Auto = "auto"  # auto: what the tokenizer has
    dropout: Fraction = 0.0
    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: PositiveFloat = 10_000.0  # rotary only: the slowest wavelength is 2 pi x theta tokens
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_eps: PositiveFloat = 1e-5  # added to the variance
    ffn: Literal["gelu", "swiglu"] = "gelu"
    kv_heads: PositiveInt | Auto = "auto"  # heads that share keys and values: grouped-query attention; auto: as many as heads
    bias: bool = True  # of linear maps and LayerNorms
    qk_norm: bool = False  # an RMSNorm on each head's queries and keys: bounds the attention scores
    sliding_window: PositiveInt | None = None  # tokens that one attends to, itself included; None: all before it
    tied_head: bool = True  # the head's matrix is the token embedding's

    @property
    def hidden_width(self) -> int:
        """Width of the feed-forward layer (F)."""
        if self.ffn_width != "auto":
            return self.ffn_width
        return 4 * self.width if self.ffn == "gelu" else -(-8 * self.width // (3 * 64)) * 64

    @property
    def head_width(self) -> int:
        """Width of one attention head (K)."""
        return self.width // self.heads

    @property
    def key_heads(self) -> int:
        """Heads of keys and of values (G)."""
        return self.heads if self.kv_heads == "auto" else self.kv_heads

    @property
    def vocabulary(self) -> int:
        """Vocabulary size (V), which must have been resolved from the tokenizer by now."""
        assert self.vocab_size != "auto", "vocab_size is filled from the tokenizer before the model is built"
        return self.vocab_size


class SyntheticConfig(Section):
    """The corpus that has no text: a Markov source whose entropy is exactly ln(branching) nats a token."""

    vocab_size: PositiveInt = 64
    branching: PositiveInt = 4
    tokens: PositiveInt = 1_000_000


class MixturePart(Section):
    """One corpus of a mixture."""

    corpus: str
    weight: PositiveFloat  # its share of the training windows is weight / sum of all weights


class DataConfig(Section):
    """Where the tokens come from."""

    # A known name, a text file, a glob, a folder that `ds-gpt prepare` made; or several of them with weights.
    corpus: str | Annotated[tuple[MixturePart, ...], Strict(False), Field(min_length=1)] = "python_docs"
    tokenizer: str = "auto"  # char, gpt2, bpe, or a file; auto: a prepared corpus's own, else char
    bpe_vocab_size: Annotated[int, Field(ge=257)] = 8192  # of a bpe trained on the corpus: 256 bytes, end of text, merges
    val_fraction: Annotated[float, Field(gt=0, lt=1)] | Auto = "auto"  # auto: a prepared corpus's own, else 0.1
    attend_across_documents: bool = True  # False: a token sees its own document only; needs prepared corpora
    cache_dir: str = "~/.cache/ds_gpt"
    synthetic: SyntheticConfig = SyntheticConfig()

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        """The corpora with their weights; one alone has weight 1."""
        return (MixturePart(corpus=self.corpus, weight=1.0),) if isinstance(self.corpus, str) else self.corpus

    @property
    def title(self) -> str:
        """The corpora by name, for people."""
        if isinstance(self.corpus, str):
            return self.corpus
        total = sum(part.weight for part in self.corpus)
        return " + ".join(f"{part.weight / total:.3g} x {part.corpus}" for part in self.corpus)


class BatchConfig(Section):
    """Sequences per optimizer step. The global batch is mathematics, the micro-batch is systems."""

    global_batch_size: PositiveInt
    micro_batch_size: PositiveInt | Auto = "auto"  # per rank; auto: no accumulation, but in a pipeline


class OptimizerConfig(Section):
    """AdamW (Loshchilov and Hutter, 2019) or plain SGD; decay acts on matrices only."""

    name: Literal["adamw", "sgd"] = "adamw"
    lr: PositiveFloat  # peak; under the Noam schedule the factor, 1.0 in the paper
    betas: Annotated[tuple[Fraction, Fraction], Strict(False)] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    lr_scaling: Literal["none", "sqrt_world_size"] = "none"  # by the number of data-parallel ranks


class ScheduleConfig(Section):
    """The learning rate as a function of the step."""

    name: Literal["cosine", "noam", "constant"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_steps: PositiveInt | Auto = "auto"  # step at which the minimum is reached; auto: training.steps
    min_lr: NonNegativeFloat = 0.0  # never scaled by the world size


class LossConfig(Section):
    """Cross-entropy."""

    label_smoothing: Fraction = 0.0
    chunk_tokens: PositiveInt | Auto = "auto"  # whose logits exist at a time; auto: as many as have 2^27 logits


class TrainingConfig(Section):
    """How long."""

    steps: PositiveInt


class EvaluationConfig(Section):
    """Validation loss over a fixed set of windows, the same for every world size."""

    every: PositiveInt = 500
    sequences: PositiveInt = 256
    pretraining_sequences: NonNegativeInt = 64  # after pre-training: of its validation windows, to see what is forgotten


class SampleConfig(Section):
    """The text generated at the end of a run."""

    every_evaluation: bool = False  # and at every evaluation on the way
    prompt: str = "\n"
    tokens: NonNegativeInt = 200
    temperature: NonNegativeFloat = 0.8
    top_k: PositiveInt | None = 50


class CheckpointsConfig(Section):
    """When to save and what to keep. A run always saves when it ends or is interrupted."""

    every: PositiveInt | None = None
    keep_last: PositiveInt | None = 3  # None: all
    keep_every: PositiveInt | None = None  # also keep those of every such step
    keep_best: bool = True  # also keep the one with the lowest validation loss
    background: bool = False  # write while training goes on; needs host memory for this rank's share of the state
    on_failure: Literal["stop", "continue"] = "stop"  # where a save fails, the disk being full


class HealthConfig(Section):
    """What counts as a sick run, and what is done about it. The fixed limits are in ``trainer/health.py``."""

    enabled: bool = True
    window: Annotated[int, Field(ge=16)] = 64  # steps of which the median and MAD are taken; fewer are noise themselves
    spike_mads: PositiveFloat = 6.0  # above the median, in MADs scaled to standard deviations; Gaussian noise never gets there
    patience: PositiveInt = 3  # steps in a row that confirm: a single bad batch is clipped and forgotten, a bad weight stays
    action: Literal["rollback", "warn", "stop"] = "rollback"  # on a confirmed spike, a divergence, or NaN
    max_rollbacks: NonNegativeInt = 3  # then the run stops: what comes back so often is no accident of the data
    lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.5  # on the learning rate after a rollback
    lr_factor_steps: PositiveInt = 100  # how long, beyond the step at which it went wrong
    hang_timeout_s: PositiveFloat = 900.0  # nothing finished for so long (a save: 10 times as long): every rank writes its stacks, and the run ends


class LoggingConfig(Section):
    """DEBUG logs every step, INFO every `every` steps."""

    level: Literal["DEBUG", "INFO"] = "INFO"
    every: PositiveInt = 10
    tensorboard: bool = True


class RunConfig(Section):
    """A whole run, as `ds_configs/runs/*.yaml` states it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: NonNegativeInt = 1337
    stage: Stage = "pretrain"
    init_from: str | None = None  # a run's folder, or a checkpoint: its weights alone are taken over, and its tokenizer
    model: ModelConfig
    lora: LoraConfig = LoraConfig()
    data: DataConfig = DataConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    examples: ExamplesConfig = ExamplesConfig()
    preference: PreferenceConfig = PreferenceConfig()
    batch: BatchConfig
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig
    schedule: ScheduleConfig = ScheduleConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    sample: SampleConfig = SampleConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()
    health: HealthConfig = HealthConfig()
    logging: LoggingConfig = LoggingConfig()

    @property
    def decay_steps(self) -> int:
        """Step at which the schedule reaches its minimum."""
        return self.training.steps if self.schedule.decay_steps == "auto" else self.schedule.decay_steps

    @property
    def sequences(self) -> int:
        """Sequences of one item of the batch: a pair of answers is two."""
        return 2 if self.stage in ("dpo", "reward") else 1

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether a token sees its own document only, of those that share a sequence; packed examples are documents."""
        return self.stage == "sft" or (self.stage == "pretrain" and not self.data.attend_across_documents)

    @property
    def generates(self) -> bool:
        """Whether what is trained predicts the next token, so that text can be sampled from it."""
        return self.stage != "reward" and self.objective.name == "next_token"

    @property
    def loss_chunk_tokens(self) -> int:
        """Tokens whose logits exist at a time: by default half a GiB of them in fp32, which keeps a GPU busy."""
        return max(1, 2**27 // self.model.vocabulary) if self.loss.chunk_tokens == "auto" else self.loss.chunk_tokens

    @property
    def log_every(self) -> int:
        """Steps between two lines of the log."""
        return 1 if self.logging.level == "DEBUG" else self.logging.every
