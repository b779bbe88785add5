"""Reads and writes checkpoints in every format of formats/, without executing a pickle.

    checkpoint = read_checkpoint(path)           # checks names, shapes and sizes; the data stays in the file
    checkpoint.weights["emb.weight"]             # reads the tensor, and checks that it is finite
    write_checkpoint(checkpoint, "model.safetensors", dtype="bfloat16")      # one tensor at a time; atomic

A checkpoint is read completely or rejected.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from kernels.matvec import Packed
from rwkv.chat.metadata import texts_of
from rwkv.chat.names import series_name, trained_length
from rwkv.checkpoint import adapters, card, formats, time_states, tuned
from rwkv.checkpoint.content import ENTRY, Content, Outgoing, PackedMatrix
from rwkv.checkpoint.generations import config_of, fit, recognise, require_sizes, tuned_kind
from rwkv.checkpoint.lazy_tensors import DTYPES, Stored, same_numbers
from rwkv.checkpoint.location import locate
from rwkv.config import ModelConfig
from rwkv.errors import CheckpointError, UnreadableError, UserError
from rwkv.io import hub
from rwkv.io.json_types import JsonObject
from rwkv.model.base import fingerprint, generation
from rwkv.tokenizer.tokenizers import MAX_UNUSED_ROWS, Tokenizer, end_option, require_tokenizer_type

WORLD_VOCABULARY = 65536
SUGGESTED = {50277: "20B_tokenizer.json (models trained on the Pile use this GPT-NeoX tokenizer)"}
WITH_STATES = ("pth", "safetensors", "st")               # these formats can hold tuned states besides weights
WITH_TEMPLATES = ("huggingface", "gguf")                 # these formats can hold chat templates and generation options
PACKED = formats.QUANTISED["safetensors"]                # weights in these formats stay packed in memory
NORM = re.compile(r"(?:.+\.)?ln\w+\.weight")             # weights of LayerNorms and of RWKV-7's group norm
DEFAULT_CTX_LEN = 1024                   # applies if neither the file nor its name states a length; no shape depends on it


class Weights(Mapping[str, Tensor]):
    """Maps official names to tensors, in the model's order and shapes. Each access reads the tensor from the file."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self.stored = dict(stored)

    def __getitem__(self, name: str) -> Tensor:
        return self.stored[name].get()

    def __contains__(self, name: object) -> bool:        # Mapping.__contains__ would read the tensor
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.stored.values())

    @property
    def count(self) -> int:
        """Returns the number of weights."""
        return sum(tensor.count for tensor in self.stored.values())


@dataclass
class Checkpoint:
    """A checkpoint: the weights, and from some files the tokenizer's definition and the run's configuration.

    Pickling stores only the path, and unpickling reads the file again.

    Attributes:
        weights: the tensors by official name.
        packed: the matrices that the file stores packed.
        fingerprint: the result of Model.fingerprint before the weights were packed; None if the file does not state it.
        unadapted: the original values of the matrices into which `weights` merges adapters.
        adapter_kind: the kind of adapter, if another program trained it.
        data_sha256: the hash of the run's training data.
        origin: the path of the checkpoint from which a model in memory was loaded.
    """

    path: Path
    config: ModelConfig
    vocab_size: int
    weights: Weights
    tokenizer: JsonObject | None = None
    run: JsonObject | None = None
    step: int = 0
    tokenizer_hash: str | None = None
    time_states: list[Stored] | None = None      # each layer's tuned initial state (H,N,N); None without one
    packed: Mapping[str, PackedMatrix] = field(default_factory=dict)
    fingerprint: str | None = None
    unadapted: Mapping[str, Stored] = field(default_factory=dict)
    data_sha256: str | None = None
    notes: list[str] = field(default_factory=list)           # messages about values that were assumed or ignored
    adapter_kind: str = ""
    origin: Path | None = None
    state_note: str = ""                 # a line for the user if the file of the weights also contains time_states

    def __reduce__(self) -> tuple[object, ...]:
        return read_checkpoint, (self.path,)

    def stored_in(self, dtype: str | None) -> dict[str, Stored]:
        """Returns the tensors in `dtype` (None: the file's), except those that the generation requires in float32."""
        if dtype is None:
            return dict(self.weights.stored)
        float32 = generation(self.config).KEPT_FLOAT32
        return {name: tensor.cast(DTYPES["float32" if name.endswith(float32) else dtype])
                for name, tensor in self.weights.stored.items()}

    def tensors(self, dtype: str, device: str = "cpu", mmap: bool = False) -> dict[str, Tensor]:
        """Reads the tensors of stored_in(dtype) onto `device`.

        With `mmap` on a CPU, the tensors that the file stores in `dtype` are mapped.
        """
        tensors = {name: tensor.get(copy=not mmap).to(device) for name, tensor in self.stored_in(dtype).items()}
        if torch.device(device).type == "cpu":           # decoding on a CPU can use matrices that the file stores transposed
            return tensors
        return {name: tensor.contiguous() for name, tensor in tensors.items()}


def checkpoint_of(weights: Mapping[str, Tensor], tokenizer: Tokenizer | None = None, config: ModelConfig | None = None,
                  source: str = "the weights") -> Checkpoint:
    """Makes a checkpoint from tensors in memory. Raises CheckpointError if they are not the weights of a model."""
    stored = {name: Stored.of(name, source, tensor) for name, tensor in weights.items()}
    checkpoint = _interpret(Content(Path(source), stored))
    checkpoint = replace(checkpoint, config=config or checkpoint.config)
    if tokenizer is None:
        return checkpoint
    require_tokenizer_type(tokenizer)
    _require_vocabulary(checkpoint, tokenizer)
    return replace(checkpoint, tokenizer=tokenizer.to_dict(), tokenizer_hash=tokenizer.hash)


def describe(run: JsonObject, vocab_size: int, tokenizer: Tokenizer | None) -> JsonObject:
    """Returns a checkpoint file's entry `timemix`, made of plain containers only, so that loading the file executes no code."""
    return {"format": 1, "run": run, "vocab_size": vocab_size, "tokenizer": tokenizer and tokenizer.to_dict(),
            "tokenizer_hash": tokenizer and tokenizer.hash}


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a file, a Hugging Face directory, or the last checkpoint of a run's directory.

    Raises CheckpointError. The message names the file or tensor, the actual and the expected value, and the likely cause.
    """
    path = locate(path)
    try:
        if adapters.is_directory(path):
            return with_adapter(_base_of(path), path)
        content = formats.recognise(path).read(path)
        if tuned.is_tuned(content.entry):
            return _apply_tuned(content)
        if adapters.has_adapter(content.tensors) and "emb.weight" not in content.tensors:
            raise CheckpointError(f"{path} is {tuned_kind(content.tensors)}")
        return _interpret(content)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror or error}") from error


def with_adapter(base: Checkpoint, path: str | Path, alpha: float | None = None) -> Checkpoint:
    """Returns the checkpoint `base` with another program's adapter merged into it.

    `alpha` is LoRA's alpha if the file lacks it. Raises CheckpointError for an adapter of another model or of an unsupported
    kind, UserError if alpha is missing or given twice.
    """
    path = locate(path)
    try:
        return _with_adapter(base, adapters.read(path, base.config, base.weights.stored, alpha))
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror or error}") from error


def _with_adapter(base: Checkpoint, adapter: adapters.Adapter) -> Checkpoint:
    stored = {**base.weights.stored, **adapter.whole}
    changed = {name: adapters.adapt_weight(stored[name], change, adapter.path) for name, change in adapter.changes.items()}
    weights = stored | changed
    unadapted = {name: stored[name] for name in changed}
    run = {"model": asdict(base.config), **(base.run or {}), "init_from": str(base.path)}
    return replace(base, path=adapter.path, weights=Weights(weights), packed={}, fingerprint=None, run=tuned.without_tune(run),
                   unadapted={**unadapted, **base.unadapted}, adapter_kind=adapter.about)


def _base_of(path: Path) -> Checkpoint:
    name = adapters.base_name(path)
    try:
        return read_checkpoint(name)
    except CheckpointError as error:
        raise UnreadableError(f"{path} is an adapter for {name}, which cannot be read ({error}): pass the base model as "
                              "checkpoint= and the adapter as lora=") from error


def read_tuned(path: str | Path, base: Checkpoint, alpha: float | None = None) -> tuple[Checkpoint, str]:
    """Applies a tuned checkpoint to the weights of `base`, and returns the result with a hash of the trained values.

    `path` is the directory of a run with tune=lora or tune=state, a .ckpt in that directory, or another program's adapter.
    Raises CheckpointError as read_checkpoint does, for any other kind of run, and if the run was trained on weights other than
    `base`.
    """
    path = locate(path)
    try:
        if adapters.is_directory(path):
            adapter = adapters.read(path, base.config, base.weights.stored)
            return _with_adapter(base, adapter), tuned.digest(Content(path, dict(adapter.tensors)))
        content = formats.recognise(path).read(path)
        if not tuned.is_tuned(content.entry) and adapters.has_adapter(content.tensors):
            adapter = adapters.read(path, base.config, base.weights.stored, alpha)
            return _with_adapter(base, adapter), f"{tuned.digest(content)} {alpha}"
        if not tuned.is_tuned(content.entry):
            raise CheckpointError(f"{path} is not a run with tune=state or tune=lora: expected the directory of such a run, a "
                                  ".ckpt file in that directory, or a state file")
        return _apply_tuned(content, base), tuned.digest(content)
    except OSError as error:
        raise UnreadableError(f"cannot read {path}: {error.strerror or error}") from error


def _apply_tuned(content: Content, user_base: Checkpoint | None = None) -> Checkpoint:
    """Applies the adapters or the state of a run to the frozen weights: `user_base`, or else the file that the run names."""
    entry = content.entry or {}
    try:
        source = entry["run"]["init_from"]
        base = user_base or read_checkpoint(source)
        if hub.parse(source):            # a chat template, for example, is looked for beside this path
            entry = {**entry, "run": {**entry["run"], "init_from": str(base.path)}}
    except CheckpointError as error:
        raise UnreadableError(f"cannot read the base weights of {content.path}: {error}") from error
    _require_base(content.path, base, entry, user_base is not None)
    config = generation(base.config).with_default_widths(base.config)
    stored = base.weights.stored
    weights, states = tuned.apply_trained_values(content, stored, config)
    unadapted = {name: stored[name] for name, tensor in weights.items() if tensor is not stored[name]}
    return _with_entry(replace(base, path=content.path, step=content.step, weights=Weights(weights), time_states=states,
                               packed={}, config=config, unadapted={**unadapted, **base.unadapted}), entry)


def _require_base(path: Path, base: Checkpoint, entry: JsonObject, by_user: bool) -> None:
    """Raises UnreadableError if the weights `base` are not the frozen weights of the run.

    `by_user` is True if the user named the file with the weights, False if the run's configuration did.
    """
    if entry.get("base") == fingerprint_of(base):
        return
    source = entry["run"]["init_from"]
    if by_user:
        raise UnreadableError(f"{path} was trained on the weights in {source}, but the weights in {base.path} differ: use the "
                              f"weights in {source}")
    raise UnreadableError(f"{path} was trained on the weights in {source}, which have changed since then: restore the original "
                          "weights in that file")


def write_checkpoint(checkpoint: Checkpoint, path: str | Path, dtype: str | None = None, format: str | None = None,
                     progress: Callable[[int, int], object] = lambda count, total: None, layout: str | None = None,
                     source: str | None = None, command: str | None = None, by_input: bool = False) -> None:
    """Writes a checkpoint with one tensor in memory at a time. Raises UserError, as save_pretrained does, before writing.

    Args:
        dtype: the dtype or block format to write; None keeps the dtype of each tensor.
        format: the name of a format; None infers it from the suffix of `path`.
        progress: is called after each tensor with the tensor's bytes and the total bytes.
        layout: the layout of a Hugging Face directory, one of formats.LAYOUTS.
        source: the name of the source, for the model card.
        command: the conversion command, for the model card.
        by_input: stores matrices with sparse inputs transposed; requires bfloat16 in .safetensors.
    """
    path = Path(path)
    format = format or formats.by_suffix(path)
    module = formats.load(format)
    if checkpoint.time_states and (format not in WITH_STATES or dtype in PACKED):
        raise UserError(f"{checkpoint.path} contains weights and a tuned state, but {dtype or format} can store only the "
                        f"weights: choose one of {', '.join(WITH_STATES)}, or convert the base weights alone")
    if layout is not None and format != "huggingface":
        raise UserError(f"the layout {layout} requires a Hugging Face directory; got the file name {path.name}. Omit the "
                        "suffix from the name, or omit the layout")
    block_formats = formats.QUANTISED.get(format, ())
    packed_dtypes = {matrix.dtype for matrix in checkpoint.packed.values()}
    if dtype is None and len(packed_dtypes) == 1 and packed_dtypes <= {*block_formats}:
        dtype = packed_dtypes.pop()
    quantised = dtype if dtype in block_formats else None
    if dtype is not None and dtype not in tuple(DTYPES) and not quantised:     # a tuple: dtype may be an unhashable list
        blocks = "".join(f"; in {name} also {', '.join(dtypes)}" for name, dtypes in formats.QUANTISED.items())
        raise UserError(f"dtype must be one of {', '.join(DTYPES)}{blocks}; got {dtype!r}")
    if by_input and (format, dtype) != ("safetensors", "bfloat16"):
        raise UserError("by-input requires the dtype bfloat16 and the format .safetensors; got "
                        f"{dtype or 'the original dtypes'} and {format}")
    if hasattr(module, "dtype_for"):
        group = generation(checkpoint.config).group
        tensors = {name: tensor.cast(module.dtype_for(tensor, group(name), dtype))
                   for name, tensor in checkpoint.weights.stored.items()}
    else:
        tensors = checkpoint.stored_in(None if quantised else dtype)
    tensors |= time_states.states_by_name(checkpoint.time_states or [], torch.float16 if format == "st" else torch.float32)
    total = sum(tensor.nbytes for tensor in tensors.values())
    packed = {name: _read_with_progress(matrix, partial(progress, tensors[name].nbytes, total))
              for name, matrix in checkpoint.packed.items()}
    tensors = {name: _with_progress(tensor, lambda count: progress(count, total)) for name, tensor in tensors.items()}
    run = tuned.without_base(checkpoint.run or {"model": asdict(checkpoint.config)})
    entry = describe(run, checkpoint.vocab_size, None)
    entry |= {"tokenizer": checkpoint.tokenizer, "tokenizer_hash": checkpoint.tokenizer_hash,
              "data_sha256": checkpoint.data_sha256}
    if quantised in PACKED:
        entry["fingerprint"] = checkpoint.fingerprint or fingerprint_of(checkpoint)
    text = card.directory_card(path.name, checkpoint.path, source, command) if format == "huggingface" else ""
    module.write(path, Outgoing(tensors, checkpoint.config, checkpoint.vocab_size, entry, quantised, layout, packed, text,
                                by_input, texts_beside(checkpoint) if format in WITH_TEMPLATES else {},
                                series_name(*_names_of(checkpoint))))


def texts_beside(checkpoint: Checkpoint) -> dict[str, str]:
    """Returns the chat templates and generation options in the checkpoint's directory or GGUF file, or else in its base's."""
    return next(filter(None, (texts_of(Path(name)) for name in _names_of(checkpoint) if name)), {})


def _names_of(checkpoint: Checkpoint) -> tuple[str, str | None]:
    """Returns the paths of the checkpoint, or of the one from which its model was loaded, and of the base of its run."""
    return str(checkpoint.origin or checkpoint.path), (checkpoint.run or {}).get("init_from")


def require_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer, name: str) -> None:
    """Raises CheckpointError if the weights were not trained with `tokenizer`. `name` is the tokenizer's name for the message.

    Compares the hashes if the file states one. Otherwise compares the vocabulary sizes; the checkpoint's may be slightly
    larger.
    """
    if checkpoint.tokenizer_hash is not None and checkpoint.tokenizer_hash != tokenizer.hash:
        raise CheckpointError(f"{name} is not the tokenizer that {checkpoint.path} was trained with: the SHA-256 is "
                              f"{tokenizer.hash[:12]}, but {str(checkpoint.tokenizer_hash)[:12]} was expected. The two "
                              "tokenizers give the same token ids different meanings")
    _require_vocabulary(checkpoint, tokenizer, name)
    if checkpoint.tokenizer_hash is None and tokenizer.vocab_size + MAX_UNUSED_ROWS < checkpoint.vocab_size:
        raise CheckpointError(f"{name} has {tokenizer.vocab_size} tokens, but the vocabulary of {checkpoint.path} has "
                              f"{checkpoint.vocab_size}: use the tokenizer that the weights were trained with")


def assumed_tokenizer(checkpoint: Checkpoint) -> str | None:
    """Returns "world" if the file contains no tokenizer and the vocabulary has the World models' size, otherwise None."""
    return "world" if checkpoint.tokenizer is None and checkpoint.vocab_size == WORLD_VOCABULARY else None


def tokenizer_of(checkpoint: Checkpoint, name: str | None = None, end_of_text: str | None = None,
                 option: str = "tokenizer") -> Tokenizer:
    """Returns the tokenizer called `name`, by default the checkpoint's own, or else the one from assumed_tokenizer.

    Raises UserError if there is no tokenizer, or if its hash or size does not match the checkpoint.

    Args:
        name: a name as in Tokenizer.named.
        end_of_text: the end-of-text token; by default the one that the checkpoint or else the tokenizer's file states.
        option: the option that set the name, for error messages.
    """
    name = assumed_tokenizer(checkpoint) if name is None else name
    if name is not None:
        tokenizer = Tokenizer.named(name, option, end_of_text=end_of_text, like=checkpoint.tokenizer)
    elif checkpoint.tokenizer is not None:
        try:
            tokenizer = Tokenizer.from_dict(checkpoint.tokenizer, end_of_text, end_option(option))
        except UserError as error:
            raise UserError(f"{checkpoint.path}: {error}") from None
    else:
        suggested = SUGGESTED.get(checkpoint.vocab_size, "FILE.json, FILE.txt, byte or world")
        raise UserError(f"{checkpoint.path} contains no tokenizer: pass {option}={suggested}")
    require_tokenizer(checkpoint, tokenizer, f"{option}={name}" if name else "the tokenizer in the file")
    return tokenizer


def _require_vocabulary(checkpoint: Checkpoint, tokenizer: Tokenizer, name: str = "the tokenizer") -> None:
    if tokenizer.vocab_size > checkpoint.vocab_size:
        raise CheckpointError(f"{name} has {tokenizer.vocab_size} tokens, but the vocabulary of {checkpoint.path} has "
                              f"{checkpoint.vocab_size}: use the tokenizer that the weights were trained with")


def _interpret(content: Content) -> Checkpoint:
    """Converts a file's content to official names and shapes. Raises CheckpointError if the file contradicts itself."""
    path = content.path
    module, tensors = recognise(path, content.tensors, content.declared)
    if content.tied and "emb.weight" in tensors:
        tied = tensors["emb.weight"].rename("head.weight")
        if "head.weight" in tensors and not same_numbers(tensors["head.weight"], tied):
            raise CheckpointError(f"{path} sets tie_word_embeddings to true, but the output head and the embedding differ: set "
                                  "tie_word_embeddings to false in config.json")
        tensors["head.weight"] = tied
    tuned_states = time_states.pop_states(tensors) if module.model.LEARNS_STATE else {}
    length = content.declared.get("ctx_len") or trained_length(str(path)).tokens or DEFAULT_CTX_LEN
    config, vocab_size = config_of(path, module, tensors, length)
    require_sizes(path, content.declared, config, vocab_size)
    weights = Weights(fit(path, module, tensors, config, vocab_size))
    packed = {name: matrix for name, matrix in content.packed.items() if name in weights}
    checkpoint = Checkpoint(path, config, vocab_size, weights, content.tokenizer, step=content.step, packed=packed,
                            notes=[*content.notes, *_zero_norm_notes(path, weights.stored)])
    if tuned_states:
        checkpoint = replace(checkpoint, time_states=time_states.fit_states(path, tuned_states, config), state_note=(
            f"each sequence begins with the tuned state in {path}. The state was transposed if the file's low-rank "
            "matrices are transposed"))
    return checkpoint if content.entry is None else _with_entry(checkpoint, content.entry)


def _zero_norm_notes(path: Path, stored: Mapping[str, Stored]) -> list[str]:
    """Returns a list with one message about normalisation weights of only zeros; [] if there are none.

    Training begins with ones. An interrupted download leaves zeros if the program had reserved the whole file.
    """
    zeros = []
    for name, tensor in stored.items():
        if tensor.mapped and NORM.fullmatch(name):       # other tensors would have to be read whole
            if not tensor.peek().any():
                zeros.append(name)
            tensor.drop_pages()
    return [f"{path} has {zeros[0]}{f' and {len(zeros) - 1} more' if zeros[1:] else ''} with only zeros: if the file was "
            "downloaded, the download may be incomplete. Compare its SHA-256 with the publisher's"] if zeros else []


def _with_entry(checkpoint: Checkpoint, entry: JsonObject) -> Checkpoint:
    """Adds the facts in the entry `timemix` to the checkpoint. Raises CheckpointError if they contradict the weights."""
    path = checkpoint.path
    try:
        config = ModelConfig(**entry["run"]["model"])
        stated = asdict(generation(config).with_default_widths(config)) | {"vocab_size": entry["vocab_size"]}
        tokenizer = entry["tokenizer"]
        tokenizer_hash = entry.get("tokenizer_hash")
        weights_fingerprint = entry.get("fingerprint")
        data_sha256 = entry.get("data_sha256")
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointError(f"the entry {ENTRY} in {path} cannot be read ({error!r}). A newer version of this program may "
                              "have written the file") from error
    require_sizes(path, stated, checkpoint.config, checkpoint.vocab_size)
    optional_texts = (tokenizer_hash, weights_fingerprint, data_sha256)
    if not isinstance(tokenizer, dict | None) or not all(isinstance(text, str | None) for text in optional_texts):
        raise CheckpointError(f"{path} is damaged: in the entry {ENTRY}, the tokenizer, tokenizer_hash, fingerprint or "
                              "data_sha256 has the wrong type")
    return replace(checkpoint, config=config, run=entry["run"], tokenizer=tokenizer or checkpoint.tokenizer,
                   tokenizer_hash=tokenizer_hash, fingerprint=weights_fingerprint, data_sha256=data_sha256)


class _ReleasingWeights(Mapping[str, Tensor]):
    """Maps names to tensors. Reading a tensor releases the mapped pages of the previous one, which is then invalid."""

    def __init__(self, stored: Mapping[str, Stored]) -> None:
        self._stored = stored
        self._last: Stored | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is not None:
            self._last.drop_pages()
        self._last = self._stored[name]
        return self._last.peek()

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def fingerprint_of(checkpoint: Checkpoint) -> str:
    """Computes Model.fingerprint of the checkpoint's weights, with one tensor in memory at a time."""
    return fingerprint(generation(checkpoint.config), _ReleasingWeights(checkpoint.weights.stored))


def _with_progress(tensor: Stored, progress: Callable[[int], object]) -> Stored:
    def data() -> Tensor:
        read = tensor.data()
        progress(tensor.nbytes)
        return read

    return replace(tensor, data=data)


def _read_with_progress(matrix: PackedMatrix, progress: Callable[[], object]) -> PackedMatrix:
    def read() -> Packed:
        packed = matrix.read()
        progress()
        return packed

    return replace(matrix, read=read)
