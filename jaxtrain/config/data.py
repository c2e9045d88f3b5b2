"""Section data: what is read, how it becomes tokens, how tokens become rows."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from string import Formatter
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from jaxtrain.config.base import RESUMABLE, Place, Section, at_most, excludes, known_in
from jaxtrain.config.env import EnvConfig
from jaxtrain.config.limits import ITEMS, ROWS, TOKENS, WORKERS
from jaxtrain.text_safety import redact_text


def check_column_format(text: str) -> str:
    """Return a format of a column; ValueError if it is more than text and {names of columns}."""
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"{text!r}: {error}; a brace that is meant is written twice") from None
    for _, name, spec, conversion in parts:
        if name is not None and (not name or set(name) & set(".[") or name.isdigit()):
            name = ""
        if name == "" or spec or conversion:
            raise ValueError(f"{text!r}: braces hold the name of a column and nothing else")
    return text


ColumnFormat = Annotated[str, AfterValidator(check_column_format)]

FORMATS = ("auto", "chat", "prompt_completion", "alpaca", "input_output", "completion")


class DatasetConfig(Section):
    """Source of examples: an entry of data.datasets or data.eval_datasets."""

    renamed: ClassVar[Mapping[str, str]] = {"neighbours": "neighbors"}

    path: Place
    """File (jsonl, json, csv, parquet, arrow, txt, WebDataset's tar), folder of such files, URL of
    either ("s3://bucket/*.jsonl", gs://, https://: copied to the cache first), a database by
    SQLAlchemy ("sqlite:///rows.db", see name), Hub id, or
    "builtin:calculator" (conversations that the project generates), "builtin:calculator_pairs"
    (right answers against wrong ones), "builtin:shapes" and "builtin:digits" (questions about
    pictures), "builtin:tasks" (the numbers of a taskset's tasks, env.kind verifiers), or for task
    tree "builtin:caterpillar" (random trees)."""
    name: str | None = None
    """Subset of a Hub dataset; table or query (SELECT ...) of a database."""
    split: str = "train"
    """Split, with optional slice: "train", "train[:90%]", "train[100:200]"."""
    streaming: bool = False
    """Read while training instead of downloading and shuffling as a whole."""
    format: Annotated[str, known_in("formats", FORMATS)] = "auto"
    """How to read a row: chat, prompt_completion, alpaca, input_output or completion; auto tells
    from the columns. Or a custom function: an entry point's name, "package.module:function" or
    "file.py:function" (docs/extending.md)."""
    fields: dict[str, str] = {}
    """Renamed columns, wanted = found: {messages = "conversations"} or {prompt = "question",
    completion = "answer"}; message keys with a dot: {"messages.content" = "value"}."""
    column_formats: dict[str, ColumnFormat | list[ColumnFormat]] = {}
    """Columns that are written from others: {prompt = "Q: {question}", chosen = "{chosen}\\n"}. Of
    several formats the first one counts whose columns all hold something, else the last. What one
    names is read by nothing else."""
    roles: dict[str, str] = {}
    """Renamed roles, found = wanted: {human = "user", gpt = "assistant"}; ShareGPT's are known."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template for these rows, before those of section model. A row's own
    column of this name comes first."""
    as_chat: bool = False
    """prompt_completion and alpaca: put plain strings into the chat template, as user and
    assistant."""
    train_on: Literal["all", "assistant", "last", "per_message"] = "assistant"
    """Which tokens train: all, every assistant turn (with its end-of-turn token), only the last
    one, or the messages whose own key `train` is true."""
    roles_to_train: list[Literal["assistant", "user", "tool", "system", "developer"]] = Field(
        ["assistant"], min_length=1
    )
    """Whose turns train_on assistant and last mean. Turns of others train with their header."""
    train_on_eot: Literal["turn", "all", "last", "none"] = "turn"
    """Which tokens that end turns of a conversation train: those of turns that train; all, also of
    users; the last one alone; none."""
    drop_system_message: bool = False
    """Leave out system messages at the beginning."""
    split_thinking: bool = False
    """Give the chat template thoughts that stand between tags, such as <think>, in the text of the
    assistant's messages as reasoning_content."""
    special_tokens: Literal["text", "control"] = "text"
    """What a control token is that a text of the data spells, such as "<|im_end|>": text: letters,
    as the model reads them from people. control: the control token itself, for data that are
    rendered already."""
    pairing: Literal["best_worst", "best_rest", "neighbors", "all"] = "best_worst"
    """Preference data with scores: which answers to one prompt are compared. best_worst: the best
    with the worst; best_rest: the best with each other; neighbors: each with the next one in
    order; all: each with each. Equal scores give no pair."""
    margin: Literal["column", "scores"] = "column"
    """Preference data: by how much the better answer is better. column: what the column `margin`
    says, else 0; scores: the difference of the two answers' scores."""
    group_prompts: bool = False
    """Preference data: rows with the same prompt become one tree, which computes it once. Reads
    all rows at the start."""
    image_folder: Place | None = None
    """Folder in which relative paths of images start, and which none of them leaves. Unset: the
    dataset's."""
    image_hosts: list[str] = []
    """Hosts from which images are fetched whose rows hold a URL; none by default."""
    weight: float | None = Field(None, gt=0)
    """Share of this dataset in the rows drawn, relative to the others' (unset counts as 1).
    Without any weight an epoch holds every row of every dataset once; with weights it is as long,
    and a dataset that is used up starts over."""
    max_rows: int | None = Field(None, ge=1)
    """Use only the first rows of the split."""
    held_out: float = Field(0.0, ge=0)
    """Share (below 1) or number of its rows that are held out of training and become a held-out
    dataset; unset: what data.validation_split says of all. Rows are taken by what they ask, so none
    with the same prompt is on both sides."""
    part: Literal["train", "held_out"] = "train"
    """Which of the two sides this entry reads, where held_out is set."""
    tools: Place | None = None
    """JSON file with the tool schemas of trajectories that do not bring their own (task tree)."""
    options: dict[str, Any] = {}
    """Options of a builtin generator, such as num_rows and seed."""
    env: EnvConfig | None = None
    """task.kind rl: what plays this dataset's rows, with the keys of section env. Unset: section
    env itself."""
    rewards: list[str] | None = None
    """task.kind rl: which of the [[rewards]] judge this dataset's rows, by name. Unset: all; []:
    none, because the environment judges."""

    @property
    def reading(self) -> dict[str, Any]:
        """Arguments of data.chat.rows.Row: rules for reading columns and messages."""
        keys = ("fields", "roles", "column_formats", "drop_system_message", "split_thinking")
        return {key: getattr(self, key) for key in keys}

    @property
    def shown_path(self) -> str:
        """Its path without what a URL holds of secrets."""
        return redact_text(self.path)

    def label(self, datasets: Sequence["DatasetConfig"] = ()) -> str:
        """Name in metrics: the file's, with a number where one of the others has it, too."""
        stem = PurePath(self.shown_path.rpartition(":")[2]).stem or self.path
        label = f"{stem}-{self.name}" if self.name else stem
        number = sum(dataset.label() == label for dataset in datasets)
        return f"{label}-{number + 1}" if number else label


def find_stream_conflicts(config: Any, reader: str) -> list[str]:
    """Return a sentence for each streamed dataset, where `reader` needs rows in any order."""
    streamed = (dataset.path for dataset in config.data.datasets if dataset.streaming)
    return [f"{reader} at hand; set streaming of {path!r} to false" for path in streamed]


PACKING_RULES = (
    at_most("data.sequence_len", "task.max_packed_tokens"),
    excludes("task.units_per_step", "data.global_batch_size"),
)
"""Conflicts of methods whose rows become trees: data.sequence_len limits one path of a tree."""


class DataConfig(Section):
    """Datasets and how they are tokenized, packed and ordered."""

    datasets: list[DatasetConfig] = []
    """Training data, mixed by weight."""
    eval_datasets: Annotated[list[DatasetConfig], RESUMABLE] = []
    """Held-out data for eval/loss."""
    validation_split: float = Field(0.0, ge=0)
    """Share (below 1) or number of rows of every dataset that are held out of training and become
    eval_datasets: by the text of their prompts, so the same ones in every run of these data. A
    dataset's own held_out says otherwise for it."""
    sequence_len: int = Field(2048, ge=8, le=TOKENS)
    """Tokens of a packed row."""
    micro_batch_size: int = Field(1, ge=1, le=ROWS)
    """Rows per device in one forward pass."""
    global_batch_size: int | None = Field(None, ge=1, le=ITEMS)
    """Rows of a whole optimizer step. When set, gradient accumulation follows from it, so the same
    run can go on with another number of devices."""
    packing: bool = True
    """Pack several samples into a row (they never see each other); false: one sample a row."""
    share_prefixes: bool = True
    """Task sft: the samples of a conversation whose chat template rewrites history (Qwen3's leaves
    earlier thinking out) become one tree, which computes what they begin with once; the loss is the
    same. false, or a model whose layers do not follow trees: each a sample of its own."""
    packing_window: int = Field(256, ge=1, le=ROWS)
    """Samples looked ahead at while rows are filled, longest first."""
    image_patches: int | None = Field(None, ge=1, le=TOKENS)
    """Patches of images in a packed row at most, beside its tokens. Unset: as many as sequence_len
    tokens can stand for. A row with more is dropped and counted."""
    length_buckets: list[int] = []
    """Shorter row lengths that a step may be cut to, when all its rows fit: less padding for one
    more compilation each. Useful without packing, as trees of unlike sizes are trained."""
    too_long: Literal["drop", "truncate", "error"] = "drop"
    """What happens to a sample longer than sequence_len; completion text is always split."""
    cache: Annotated[bool, RESUMABLE] = True
    """With run.num_epochs, whose steps are counted beforehand: keep what was tokenized for that on
    disk, by the content of rows, tokenizer and keys, and read it again."""
    cache_dir: Annotated[Place | None, RESUMABLE] = None
    """Where. Unset: jaxtrain/tokenized in $XDG_CACHE_HOME or ~/.cache. What was not used for 30
    days is deleted there."""
    shuffle: bool = True
    """Shuffle globally, anew each epoch, from run.seed."""
    shuffle_buffer: int = Field(10_000, ge=1, le=ITEMS)
    """Rows that a streamed dataset is shuffled within."""
    num_workers: int = Field(0, ge=0, le=WORKERS)
    """Processes that read and tokenize; 0: a thread of this one."""
    prefetch: Annotated[int, RESUMABLE] = Field(2, ge=1, le=1024)
    """Batches prepared ahead of the step."""

    @model_validator(mode="after")
    def hold_out(self) -> "DataConfig":
        """Divide every dataset as its held_out says, or validation_split."""
        share = self.validation_split
        separate = [dataset for dataset in self.eval_datasets if dataset.part != "held_out"]
        divided = len(separate) < len(self.eval_datasets)  # by hand, or in a run's own config
        if (share and separate) or (divided and not share):
            return self
        trained = [
            dataset if dataset.held_out else dataset.model_copy(update={"held_out": share})
            for dataset in self.datasets
        ]
        held = [
            dataset.model_copy(update={"part": "held_out", "weight": None})
            for dataset in trained
            if dataset.held_out and dataset.part == "train"
        ]
        if held:
            # Sections are frozen; this one changes before anything has read it.
            object.__setattr__(self, "datasets", trained)
            object.__setattr__(self, "eval_datasets", separate + held)
        return self

    def find_split_conflicts(self) -> Iterator[str]:
        """Yield one sentence for each reason why rows cannot be held out."""
        share = self.validation_split
        if share and any(dataset.part != "held_out" for dataset in self.eval_datasets):
            yield (
                "data.validation_split and data.eval_datasets are both set; keep the one that says"
                " what is held out"
            )
        shares = {"data.validation_split": share}
        for index, dataset in enumerate(self.datasets):
            if dataset.held_out != share:
                shares[f"data.datasets.{index}.held_out"] = dataset.held_out
        for key, value in shares.items():
            if value >= 1 and value != int(value):
                yield f"{key} {value:g} is neither a share below 1 nor a whole number of rows"
        for dataset in [*self.datasets, *self.eval_datasets]:
            if dataset.held_out and dataset.streaming:
                yield (
                    f"data.validation_split needs the number of rows, which the stream"
                    f" {dataset.path!r}"
                    " does not have; set its streaming to false, or name data.eval_datasets"
                )
                return
            if dataset.held_out and dataset.path.startswith("builtin:"):
                yield (
                    f"data.validation_split: {dataset.path!r} makes its rows; name"
                    f" data.eval_datasets"
                    " with another options.seed"
                )
                return
