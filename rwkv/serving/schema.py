"""Declares the fields of request bodies, with types and ranges. OpenAI's fields have OpenAI's types and ranges.

The server ignores OpenAI's fields that do not affect the text, and refuses unsupported and unknown fields, with exceptions:
- A field with null counts as absent, even an unknown field, because some clients send all fields that they know.
- -1 counts as absent in seed, top_k and the fields for the number of new tokens, because clients of llama.cpp, LM Studio and
  vLLM send -1.
- 2.0 counts as 2, as in JSON Schema, because languages without integers send 2.0.
- Options of Ollama, llama.cpp and vLLM are accepted, because clients such as Open WebUI and SillyTavern send them. If this
  server lacks an option, the value must turn the option off.
"""

import math
import re
import secrets
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, replace
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import msgspec

from rwkv.chat.thoughts import Think, parse_think
from rwkv.config import Sampling
from rwkv.generation.grammar import Grammar
from rwkv.io.json_types import JsonMapping, JsonObject
from rwkv.serving.http.errors import ApiError
from rwkv.tokenizer.tokenizers import Tokenizer

LONGEST_STOP = 256                       # characters
# OpenAI allows 4 stop strings. vLLM, llama.cpp and Ollama have no limit, so clients send more: Continue 9, RWKV-Runner 10
MOST_STOPS = 32
LONGEST_ERROR = 400                      # characters
MOST_ROWS = 128                          # maximum sequences in one request
MOST_LOGPROBS = 20                       # maximum top log-probabilities per position, as in OpenAI's chat API
MOST_ECHO_LOGPROBS = 5                   # the maximum with echo, which also returns log-probabilities of the prompt
MOST_TOOLS = 128                         # maximum tools in one request
NO_LIMIT = -1                            # the number of tokens that clients without a limit send
MOST_CORRECTED = 8                       # maximum nested places with unknown null fields, or with floats such as 2.0

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MOST_ROWS)]
NewTokens = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
MaxTokens = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]            # NO_LIMIT means the server's default
Seed = Annotated[int, msgspec.Meta(ge=-2**63, le=2**63 - 1)]             # -1 requests a random seed
# OpenAI's API allows names of up to 64 letters, digits, _ and -, Anthropic's up to 128. Names of MCP's tools may have . and /
ToolName = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_./-]{1,128}$(?!\n)")]
StateId = Annotated[str, msgspec.Meta(max_length=64)]
Body = TypeVar("Body", bound=msgspec.Struct)

# This server does not have the samplers with these options. The listed values turn a sampler off.
OFF: dict[str, tuple[object, ...]] = {
    "mirostat": (0,), "tfs_z": (1,), "typical_p": (1,), "top_a": (0,), "top_n_sigma": (0, -1), "xtc_probability": (0,),
    "dry_multiplier": (0,), "dynatemp_range": (0,), "smoothing_factor": (0,)}
# This server does not have these options either. The listed values have no effect.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "stop_token_ids": ([],), "include_stop_str_in_output": (False,), "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,), "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "safe_prompt": (False,)}
CONSTRAINTS = {"json": "json", "regex": "regex", "choice": "choice", "grammar": "lark"}  # vLLM's names, with Constraint's kinds
# A surrogate pair or an unpaired surrogate, which encodes no character, after an even number of backslashes
SURROGATE = re.compile(rb"(?<!\\)((?:\\\\)*)(?:(\\u(?i:d[89ab][\da-f]{2})\\u(?i:d[c-f][\da-f]{2}))|\\u(?i:d[89a-f][\da-f]{2}))")
REPLACEMENT = rb"\ufffd"                 # has the length of the escape that it replaces, so that offsets in errors stay correct
GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
ANY_OBJECT: JsonObject = {"type": "object"}
CONTINUATION = ("add_generation_prompt", "continue_final_message")       # the options in NEUTRAL that chat completions support
CONTINUED = ("prefix", "partial")        # fields that mark a message to continue, of DeepSeek and Mistral, and of Kimi and Qwen
# The server ignores the parameters of the samplers in OFF, and options for loading and memory, because the size of a state is
# constant and the model stays loaded.
WITHOUT_EFFECT = (
    "mirostat_eta", "mirostat_tau", "xtc_threshold", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
    "dry_sequence_breakers", "dynatemp_exponent", "smoothing_curve", "repeat_last_n", "num_ctx", "num_batch", "num_keep",
    "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram", "keep_alive", "cache_prompt",
    "guided_decoding_backend")


Ignored = Any                            # a field that is accepted and has no effect
Unchecked = Any                          # the code that uses such a field checks it, and can name the place of a mistake
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None      # ignored
    continuous_usage_stats: bool | None = None   # vLLM's option, ignored: only the last chunk has the usage


class TextFormat(msgspec.Struct, tag="text", tag_field="type", forbid_unknown_fields=True):
    json_schema: None = None             # see ObjectFormat


class ObjectFormat(msgspec.Struct, tag="json_object", tag_field="type", forbid_unknown_fields=True):
    schema: JsonObject | None = None     # clients of llama.cpp, llama-cpp-python and Together send the schema here
    value: JsonObject | None = None      # clients of TGI, and Hugging Face's InferenceClient, send the schema here
    json_schema: None = None             # some clients send the fields of other formats as null


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    name: Ignored = None                 # required by OpenAI, but not by llama.cpp, LM Studio and Perplexity
    description: str | None = None
    schema: JsonObject
    strict: bool | None = None           # ignored, because schemas are always enforced


class SchemaFormat(msgspec.Struct, tag="json_schema", tag_field="type", forbid_unknown_fields=True):
    json_schema: JsonSchema | None = None
    schema: JsonObject | None = None     # llama.cpp and Together also allow the schema here
    name: Ignored = None
    description: Ignored = None
    strict: Ignored = None


class GrammarText(msgspec.Struct, forbid_unknown_fields=True):
    """A grammar. The fields are those of OpenAI's custom tools."""

    syntax: Literal["lark", "regex"]
    definition: Annotated[str, msgspec.Meta(min_length=1)]


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's constraints on the answer, of which a request may have one. Empty strings and lists count as absent."""

    json: str | JsonObject | None = None         # a schema, or the text of a schema
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None           # in Lark's syntax
    disable_fallback: Literal[False] | None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


class Constraint(NamedTuple):
    """A request's constraint on the answer.

    Attributes:
        field: the field's path in the request.
        kind: "json", "regex", "choice" or "lark".
        value: the schema, regular expression, list of texts, or grammar.
    """

    field: str
    kind: str
    value: Any

    @property
    def option(self) -> str:
        """The request's own field: response_format for response_format.schema."""
        return self.field.partition(".")[0]

    def grammar(self) -> Grammar:
        """Returns the grammar. Raises UserError or ApiError for an invalid value."""
        constructors: dict[str, Callable[[Any, str], Grammar]] = {
            "json": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choice, "lark": Grammar.lark}
        if self.kind == "lark" and GBNF_RULE.search(self.value):         # llguidance's converter changes the language
            raise ApiError(400, f"{self.field} must be a grammar in Lark's syntax, with rules such as start: \"yes\" | \"no\". "
                                "GBNF, whose rules contain ::=, is not supported", self.field)
        return constructors[self.kind](self.value, self.field)


def _schema_in(value: str | JsonObject, field: str) -> Any:
    """Returns the JSON schema in a field, whose value is the schema or its text. Raises ApiError if the text is not JSON."""
    try:
        return msgspec.json.decode(value) if isinstance(value, str) else value
    except (msgspec.DecodeError, RecursionError):
        raise ApiError(400, f"{field} must be a JSON schema, or the text of one", field) from None


def _request_field(item: Field) -> tuple[str, object, None]:
    """Returns the request field for a field of Sampling: the name, the type with range and help text, and the default."""
    low, high = item.metadata["served"] or (item.metadata["least"], item.metadata["most"])
    limits = msgspec.Meta(ge=low, le=None if high == math.inf else high)
    kinds: dict[object, Any] = {
        float: Annotated[float, limits], int: Annotated[int, limits], str: Literal[tuple(item.metadata["one_of"] or ("",))],
        tuple[int, ...]: list[TokenId], tuple[int | str, ...]: str | list[str | TokenId],
        Mapping[int, float]: dict[TokenId, Annotated[float, limits]]}
    return item.name, Annotated[kinds[item.type] | None, msgspec.Meta(description=item.metadata["help"])], None


if TYPE_CHECKING:                        # mypy cannot see the fields of a class that is made at run time
    SamplingFields = msgspec.Struct
else:
    SamplingFields = msgspec.defstruct("SamplingFields", map(_request_field, fields(Sampling)), kw_only=True)


class SharedFields(SamplingFields, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions, chat completions and responses share."""

    model: str | None = None
    stream: bool | None = None
    stop: str | list[str] | None = None
    seed: Seed | None = None
    random_seed: Seed | None = None      # Mistral's name of seed
    ignore_eos: bool | None = None       # llama.cpp and vLLM: never end before max_tokens; stop strings still end the text
    min_tokens: NewTokens | None = None  # vLLM; requires ignore_eos here. Benchmarks send both
    state: StateId | None = None         # the state that the prompt continues
    save_state: bool | None = None       # save each sequence's final state
    user: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    cache_control: Ignored = None        # Anthropic's field, which gateways and agents also send to OpenAI's endpoints

    def first_seed(self) -> int:
        """Returns the seed of the first sequence, from 0 to 2**63 - 1 - MOST_ROWS. Further sequences count up from there."""
        seeds = {seed for seed in (self.seed, self.random_seed) if seed not in (None, -1)}
        if len(seeds) > 1:
            raise ApiError(400, "random_seed conflicts with seed: send only one of the two", "random_seed")
        return seeds.pop() % (2**63 - MOST_ROWS) if seeds else secrets.randbelow(2**62)


if TYPE_CHECKING:
    class ForeignFields(SharedFields):
        """Adds the options of other servers. Every request that generates text may have these options."""

        repetition_penalty: float | None = None
        repeat_penalty: float | None = None
        repeat_last_n: Any = None
else:
    _, *_penalty = next(_request_field(item) for item in fields(Sampling) if item.name == "repetition_penalty")
    _others = [("repeat_penalty", *_penalty), *((name, Any, None) for name in (*OFF, *NEUTRAL, *WITHOUT_EFFECT))]
    ForeignFields = msgspec.defstruct("ForeignFields", _others, bases=(SharedFields,), kw_only=True, forbid_unknown_fields=True)


class Options(ForeignFields, forbid_unknown_fields=True, kw_only=True):
    """The fields that completions and chat completions share."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    stream_options: StreamOptions | None = None
    n: Count | None = None
    max_tokens: MaxTokens | None = None
    response_format: TextFormat | ObjectFormat | SchemaFormat | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None   # Ollama's name for response_format
    grammar: GrammarText | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | JsonObject | None = None          # this field and the next three have these names in vLLM before 0.12
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    store: Ignored = None
    metadata: Ignored = None

    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MOST_STOPS or any(not 1 <= len(stop) <= LONGEST_STOP for stop in stops):
            raise ApiError(400, f"stop must have at most {MOST_STOPS} strings, each with 1 to {LONGEST_STOP} characters",
                           "stop")
        return stops

    def constraint(self) -> Constraint | None:
        """Returns the constraint on the answer, or None if the answer may be any text.

        Raises ApiError if the request has more than one constraint.
        """
        first = None
        for constraint in self._constraints():
            if first is None:
                first = constraint
            elif constraint[1:] != first[1:]:            # guidance sends equal structured_outputs and guided_grammar
                field, other = first.option, constraint.option
                if field == other:
                    field, other = first.field, constraint.field
                raise ApiError(400, f"{field} conflicts with {other}: send only one of the two", field)
        return first

    def _constraints(self) -> Iterator[Constraint]:
        if self.grammar is not None:
            yield Constraint("grammar.definition", self.grammar.syntax, self.grammar.definition)
        if self.format:
            yield Constraint("format", "json", ANY_OBJECT if self.format == "json" else self.format)
        if isinstance(self.response_format, ObjectFormat):
            schemas = {"value": self.response_format.value, "schema": self.response_format.schema}
            yield from (Constraint(f"response_format.{name}", "json", schema) for name, schema in schemas.items()
                        if schema is not None)
            if not any(schema is not None for schema in schemas.values()):
                yield Constraint("response_format", "json", ANY_OBJECT)
        if isinstance(self.response_format, SchemaFormat):
            nested = self.response_format.json_schema
            if nested is None and self.response_format.schema is None:
                raise ApiError(400, "response_format.json_schema is required, because response_format.type is json_schema",
                               "response_format.json_schema")
            if nested is not None:
                yield Constraint("response_format.json_schema.schema", "json", nested.schema)
            if self.response_format.schema is not None:
                yield Constraint("response_format.schema", "json", self.response_format.schema)
        for source, prefix, path in ((self, "guided_", "guided_"), (self.structured_outputs, "", "structured_outputs.")):
            for name, kind in CONSTRAINTS.items():
                if (value := getattr(source, f"{prefix}{name}", None)) not in (None, "", []):
                    field = f"{path}{name}"
                    yield Constraint(field, kind, _schema_in(value, field) if kind == "json" else value)
        if self.structured_outputs is not None and self.structured_outputs.json_object:
            yield Constraint("structured_outputs.json_object", "json", ANY_OBJECT)

    def sampling(self, default: Sampling, tokenizer: Tokenizer) -> Sampling:
        """Returns the sampling options of the request. Options that the request does not set come from `default`.

        Raises UserError for ids outside the vocabulary. Raises ApiError for an option that this server lacks, unless the value
        turns the option off.
        """
        if self.min_tokens and not self.ignore_eos:
            raise ApiError(400, "min_tokens requires ignore_eos=true on this server", "min_tokens")
        for options, lacks in ((OFF, "sampler"), (self.neutral, "option")):
            require_off({name: getattr(self, name) for name in options}, options, lacks)
        if self.repeat_penalty is not None and self.repetition_penalty not in (None, self.repeat_penalty):
            raise ApiError(400, "repeat_penalty conflicts with repetition_penalty: send only one of the two", "repeat_penalty")
        aliases = {"repetition_penalty": 1.0 if self.repeat_last_n == 0 else self.repeat_penalty}
        overrides: JsonObject = {}
        for item in fields(Sampling):
            value = getattr(self, item.name)
            value = aliases.get(item.name) if value is None else value
            if value is None:
                continue
            if item.type in (int, float) and value < item.metadata["least"]:     # OpenAI allows 0; top_k may be -1
                value = 0.0 if item.metadata["or_zero"] else item.metadata["least"]
            overrides[item.name] = value
        sampling = replace(default, **overrides)
        if self.ignore_eos:
            sampling = replace(sampling, banned=(*sampling.banned, *tokenizer.ends))
        sampling.check_ids(tokenizer.vocab_size)
        # no_penalty is encoded here, because other sequences would wait if the engine encoded it
        return replace(sampling, no_penalty=sampling.ids_without_penalty(tokenizer))


def require_off(options: JsonMapping, off: Mapping[str, tuple[object, ...]], lacks: str, prefix: str = "") -> None:
    """Raises ApiError for an option whose value would have an effect.

    Args:
        options: the request's options; None counts as absent.
        off: for each option, the values that have no effect.
        lacks: what the server does not have, for the error message: "sampler" or "option".
        prefix: the path of the options in the request, such as "options.".
    """
    for name, value in options.items():
        if value is not None and value not in off[name]:
            neutral = msgspec.json.encode(off[name][0]).decode()
            raise ApiError(400, f"{prefix}{name} must be {neutral}, because this server does not support this {lacks}",
                           f"{prefix}{name}")


class CompletionRequest(Options, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    suffix: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    # OpenAI allows 5, but SillyTavern sends 10, and vLLM allows 20
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None


THINK_OF_PROMPT: dict[str, Think] = {"open_think": True, "fake_think": "fake", "no_think": False}      # rwkv_generation_prompt
THINK_OF_TYPE: dict[str, Think] = {"enabled": True, "disabled": False}     # with other types, the model decides
THINK_OF_EFFORT: dict[str, Think] = {"none": False, "minimal": "fake"}   # all other efforts mean True
HINT_OF_EFFORT = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True):
    enable_thinking: bool | None = None
    thinking: bool | None = None         # the name of enable_thinking in some templates
    think: bool | Literal["true", "false", "fake"] | None = None         # values as of think= of chat.py
    reasoning_effort: Effort | None = None       # vLLM's clients also send it here
    # Options of rwkv-rs/vllm-rwkv (vllm/tokenizers/rwkv_chat.py)
    rwkv_prompt_template: Literal["bot", "assistant", "function_calling"] | None = None
    rwkv_generation_prompt: Literal["open_think", "fake_think", "no_think"] | None = None


class Function(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None           # true enforces the schema even in calls that tool_choice does not require


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function
    cache_control: Ignored = None


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class ToolChoice(msgspec.Struct, tag="function", tag_field="type", forbid_unknown_fields=True):
    function: FunctionName


class AllowedTools(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolChoice], msgspec.Meta(min_length=1, max_length=MOST_TOOLS)]


class AllowedToolsChoice(msgspec.Struct, tag="allowed_tools", tag_field="type", forbid_unknown_fields=True):
    """Restricts the tools that the answer may call.

    The prompt still shows all tools, so that cached prefixes and saved states remain usable.
    """

    allowed_tools: AllowedTools


class ThinkingSwitch(msgspec.Struct):
    """The field `thinking` of DeepSeek, GLM, Kimi and Doubao, whose further fields, such as a budget, have no effect."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class Thinking(NamedTuple):
    """Whether and how a request asks for thoughts.

    Attributes:
        think: whether and how the answer begins with thoughts, as in ChatTemplate.render.
        effort: how long the thoughts should be, as in ChatTemplate.render.
        field: the name of the request's field that decided `think`; "" if no field did.
        wish: whether `field` is an effort, which is ignored if the template does not support thoughts.
    """

    think: Think
    effort: str | None
    field: str
    wish: bool


class ChatRequest(Options, forbid_unknown_fields=True, kw_only=True):
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {name: NEUTRAL[name] for name in NEUTRAL if name not in CONTINUATION}

    messages: Unchecked
    continue_final_message: Annotated[bool | None, msgspec.Meta(
        description="Continue the last message, which begins the answer. The response has only the continuation.")] = None
    add_generation_prompt: Annotated[bool | None, msgspec.Meta(
        description="Must be false or absent if the request continues the last message, and true or absent otherwise.")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    max_completion_tokens: MaxTokens | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None        # [] counts as absent
    tool_choice: Literal["none", "auto", "required", "any"] | ToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None  # some clients send it here, others in chat_template_kwargs
    reasoning_effort: Effort | None = None
    think: bool | Literal["", "low", "medium", "high", "max"] | None = None      # Ollama's field: on, off or an effort
    thinking: ThinkingSwitch | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Ignored = None            # the server ignores preferences about style and speed
    prediction: Ignored = None
    functions: None = None               # the server does not support this field and the fields below
    function_call: None = None
    audio: None = None
    web_search_options: None = None
    moderation: None = None

    def continues(self) -> bool:
        """Returns whether the answer continues the last message. Raises ApiError for conflicting fields."""
        last = self.messages[-1] if isinstance(self.messages, list) and self.messages else None
        marked = isinstance(last, dict) and any(last.get(field) is True for field in CONTINUED)
        if marked and self.continue_final_message is False:
            raise ApiError(400, "continue_final_message must be true or absent, because the last message is marked as a prefix",
                           "continue_final_message")
        continues = self.continue_final_message is True or marked
        if self.add_generation_prompt is continues:      # add_generation_prompt is not None and equals `continues`
            problem = "must be false, because the request continues the last message" if continues else (
                "must be true or absent, because the request does not continue the last message")
            raise ApiError(400, f"add_generation_prompt {problem}", "add_generation_prompt")
        return continues

    def callable_tools(self) -> list[tuple[int, Function]]:
        """Returns the functions that the answer may call, each with its index in `tools`.

        Raises ApiError if tool_choice names a function that is not in `tools`.
        """
        functions = [tool.function for tool in self.tools or ()]
        choice = self.tool_choice
        names = [function.name for function in functions]
        if isinstance(choice, ToolChoice):
            allowed_names = [choice.function.name]
        elif isinstance(choice, AllowedToolsChoice):
            allowed_names = [tool.function.name for tool in choice.allowed_tools.tools]
        else:
            allowed_names = names
        if unknown := [name for name in allowed_names if name not in names]:
            raise ApiError(400, f"tool_choice must name only functions that are in tools ({', '.join(names)[:200]}); "
                                f"got {unknown[0][:100]!r}", "tool_choice")
        return [(place, function) for place, function in enumerate(functions) if function.name in allowed_names]

    def requested_thinking(self, thinks: bool) -> Thinking:
        """Returns whether and how the answer begins with thoughts. Raises ApiError for conflicting fields.

        `thinks` says whether the template supports thoughts. If it does not, an effort has no effect.
        """
        kwargs = self.chat_template_kwargs or TemplateOptions()
        switches = {"chat_template_kwargs.think": None if kwargs.think is None else parse_think(str(kwargs.think).lower()),
                    "chat_template_kwargs.rwkv_generation_prompt": THINK_OF_PROMPT.get(kwargs.rwkv_generation_prompt or ""),
                    "enable_thinking": self.enable_thinking, "think": self.think if isinstance(self.think, bool) else None,
                    "thinking": THINK_OF_TYPE.get(self.thinking.type) if self.thinking else None,
                    "chat_template_kwargs.enable_thinking": kwargs.enable_thinking,
                    "chat_template_kwargs.thinking": kwargs.thinking}
        efforts = {"reasoning_effort": self.reasoning_effort, "think": self.think if isinstance(self.think, str) else None,
                   "chat_template_kwargs.reasoning_effort": kwargs.reasoning_effort}
        requested: dict[str, Think] = {field: think for field, think in switches.items() if think is not None}
        by_effort, effort = next(((field, effort) for field, effort in efforts.items() if effort and thinks), ("", None))
        if effort:
            requested[by_effort] = THINK_OF_EFFORT.get(effort, True)
        for first, second in combinations(requested, 2):
            if {requested[first], requested[second]} == {True, False}:
                raise ApiError(400, f"{second} conflicts with {first}: one field turns reasoning on, and the other turns "
                                    "reasoning off. Send only one of the two", second)
        field = next(iter(requested), "")
        return Thinking(requested.get(field, False), HINT_OF_EFFORT.get(effort or ""), field, field == by_effort)


class ResponseTool(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A function that the model may call. Chat completions nest the same fields in another object."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class ResponseToolChoice(msgspec.Struct, tag="function", tag_field="type", forbid_unknown_fields=True):
    name: str


class ResponseAllowedTools(msgspec.Struct, tag="allowed_tools", tag_field="type", forbid_unknown_fields=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ResponseToolChoice], msgspec.Meta(min_length=1, max_length=MOST_TOOLS)]


# Only message.output_text.logprobs has an effect, because thoughts are always complete and answers have no other items
Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content", "message.input_image.image_url",
                   "file_search_call.results", "web_search_call.results", "web_search_call.action.sources",
                   "computer_call_output.output.image_url", "code_interpreter_call.outputs"]


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    effort: Effort | None = None
    summary: Ignored = None              # ignored, because thoughts are not summarised
    generate_summary: Ignored = None


class TextOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format: JsonObject | None = None     # the check is that of response_format
    verbosity: Ignored = None


class ResponseStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None      # ignored


class ResponseRequest(ForeignFields, forbid_unknown_fields=True, kw_only=True):
    input: str | list[JsonObject] | None = None
    instructions: str | None = None
    previous_response_id: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = None
    max_output_tokens: MaxTokens | None = None
    tools: Annotated[list[ResponseTool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | ResponseAllowedTools | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextOptions | None = None
    include: list[Included] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_LOGPROBS)] | None = None
    metadata: Annotated[dict[str, str], msgspec.Meta(max_length=16)] | None = None
    background: bool | None = None
    truncation: Literal["auto", "disabled"] | None = None        # ignored, because the state's size is constant
    max_tool_calls: Ignored = None
    client_metadata: Ignored = None      # Codex sends this field
    conversation: None = None            # the server does not support this field and the fields below
    prompt: None = None
    context_management: None = None


class StateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """The body of POST /v1/states: a prompt or messages to read, which may continue `state`."""

    prompt: str | list[TokenId] | None = None
    messages: Unchecked = None
    tools: Annotated[list[Tool], msgspec.Meta(max_length=MOST_TOOLS)] | None = None
    state: StateId | None = None
    model: str | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[TokenId]
    model: str | None = None


UNSUPPORTED = {
    "functions": "functions is deprecated and not supported by this server: send tools",
    "function_call": "function_call is deprecated and not supported by this server: send tool_choice",
    "modalities": 'modalities must be ["text"]: the model writes only text',
    "audio": "audio is not supported by this server, because the model writes only text",
    "web_search_options": "web_search_options is not supported by this server, because the model cannot search",
    "moderation": "moderation is not supported by this server",
    "conversation": "conversation is not supported by this server: send previous_response_id",
    "prompt": "prompt is not supported by this server, because the server stores no prompts: send instructions and input",
    "context_management": "context_management is not supported by this server, because the state's size is constant",
}

JSON_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}


def read(body: bytes, kind: type[Body]) -> Body:
    """Decodes a JSON body as the type `kind`, and ignores a byte order mark. Raises ApiError, naming the wrong field.

    An unpaired surrogate, as in a text that was cut inside an emoji, becomes U+FFFD.
    """
    body = body.removeprefix(BOM_UTF8)
    try:
        try:
            return _decode(body, kind)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            repaired = SURROGATE.sub(lambda match: match[0] if match[2] else match[1] + REPLACEMENT, body)
            if repaired == body:
                raise
            return _decode(repaired, kind)
    except msgspec.ValidationError as error:
        raise _type_error(error, kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(body, error) from None


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        try:
            fields = msgspec.json.decode(body)
        except msgspec.ValidationError:                  # a number is too large for float64; this error has no field's name
            raise error from None
        return _read_leniently(fields, kind)


def _not_json(body: bytes, error: Exception) -> ApiError:
    """Returns the error for a body that is not JSON. `error` is the decoder's, which misleads if the body is not UTF-8."""
    try:
        body.decode()
    except UnicodeDecodeError as wrong:
        byte = f"byte {wrong.start} is {body[wrong.start]:#04x}"
        return ApiError(400, f"the body must be JSON in UTF-8, but {byte}. Encode the body in UTF-8, or name its charset in "
                             "the header content-type")
    return ApiError(400, f"the body must be JSON: {error}")


def _read_leniently(fields: Any, kind: type[Body]) -> Body:
    """Converts a body's JSON value to the type `kind`, with whole numbers, and without unknown fields that are null."""
    fields = with_whole_numbers(fields)
    if isinstance(fields, dict):
        fields = {name: value for name, value in fields.items() if value is not None or name in kind.__struct_fields__}
    for _ in range(MOST_CORRECTED):
        try:
            return msgspec.json.decode(msgspec.json.encode(fields), type=kind)
        except msgspec.ValidationError as error:
            if not (_drop_unknown_null(fields, error) or _make_whole(fields, error)):
                raise
    return msgspec.json.decode(msgspec.json.encode(fields), type=kind)


def _drop_unknown_null(fields: Any, error: msgspec.ValidationError) -> bool:
    """Drops the unknown field that the error names, if the field is null, and returns whether it was dropped.

    The field is also dropped from the other items of the same lists, because each of a request's tools may have it.
    """
    unknown = re.search(r"unknown field `([^`]*)`(?: - at `\$([^`]*)`)?", str(error))
    if unknown is None:
        return False
    values = [fields]
    for step in re.findall(r"[^.\[]+", unknown[2] or ""):
        values = [item for value in values for item in _items(value, step)]
    name = unknown[1]
    objects = [value for value in values if isinstance(value, dict) and value.get(name, name) is None]
    for value in objects:
        del value[name]
    return bool(objects)


def _make_whole(fields: Any, error: msgspec.ValidationError) -> bool:
    """Replaces the nested float that the error names, if it is a float such as 2.0, and returns whether it was replaced.

    All such floats in the same list are replaced, because a prompt may consist of them.
    """
    path = re.search(r"^Expected `int\b.*, got `float` - at `\$([^`]*)`", str(error))
    if path is None:
        return False
    *steps, last = re.findall(r"[^.\[]+", path[1])
    values = [fields]
    for step in steps:
        values = [item for value in values for item in _items(value, step)]
    places = [(value, key) for value in values for key in _keys(value, last)
              if isinstance(value[key], float) and value[key].is_integer()]
    for value, key in places:
        value[key] = int(value[key])
    return bool(places)


def _items(value: Any, step: str) -> list[Any]:
    """Returns the items to which a step of a path in msgspec's errors leads. "0]" stands for all items of a list."""
    return [value[key] for key in _keys(value, step)]


def _keys(value: Any, step: str) -> list[Any]:
    if step.endswith("]"):
        return [*range(len(value))] if isinstance(value, list) else []
    return [step] if isinstance(value, dict) and step in value else []


def with_whole_numbers(fields: Any) -> Any:
    """Returns a body in which each field of the outermost object with a float such as 2.0 has the int instead."""
    if not isinstance(fields, dict):
        return fields
    return {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in fields.items()}


def convert(fields: JsonObject, kind: type[Body]) -> Body:
    """Converts the fields to the type `kind`. Raises ApiError, naming the wrong field."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _type_error(error, kind) from None


def _type_error(error: msgspec.ValidationError, kind: type) -> ApiError:
    message = str(error)
    path = re.search(r" (?:at|in) `\$\.?([^`]*)`", message)
    unknown = re.search(r"unknown field `([^`]*)`", message)
    missing = re.search(r"missing required field `([^`]*)`", message)
    inner = unknown or missing
    param = ".".join(part for part in (path and path[1], inner and inner[1]) if part)
    field = re.split(r"[.[]", param)[0]
    if kind in (ChatRequest, ResponseRequest) and field in UNSUPPORTED and field in kind.__struct_fields__:
        return ApiError(400, UNSUPPORTED[field], param, "unsupported_parameter")
    where = (path and path[1]) or "the body"
    return ApiError(400, f"{where}{_problem(message, kind, where)}"[:LONGEST_ERROR], param[:LONGEST_ERROR] or None,
                    "unknown_parameter" if unknown else None)


def _problem(message: str, kind: type, where: str) -> str:
    """Returns what is wrong in words that follow the field's path. The words repeat names and values of the request."""
    wrong = re.match(r"Invalid (?:enum )?value ('.*')", message)
    if wrong and (values := _allowed_values(kind, where)):
        return f" must be {'one of ' * (len(values) > 1)}{', '.join(values)}; got {wrong[1][:100]}"
    if message.startswith("Expected `str` matching regex"):              # only ToolName has a pattern
        return " must have 1 to 128 characters, each a letter, a digit, _, -, . or /"
    problem = re.sub("(?<=xpected )`[^`]*`|(?<=got )`[^`]*`", _json_type_names, message.partition(" - at ")[0]).replace("`", "")
    return f": {problem[:1].lower()}{problem[1:]}"


def _allowed_values(kind: type, path: str) -> list[str]:
    """Returns the strings that a field may have, sorted. `path` is the field's path in msgspec's errors."""
    schema, components = schema_of(kind)

    def alternatives(schema: JsonObject) -> Iterator[JsonObject]:
        if "$ref" in schema:
            schema = components[schema["$ref"].rpartition("/")[2]]
        yield schema
        for alternative in schema.get("anyOf", ()):
            yield from alternatives(alternative)

    schemas = [*alternatives(schema)]
    for step in re.findall(r"[^.\[]+", path):
        below = [each.get("items") if step.endswith("]") else each.get("properties", {}).get(step) for each in schemas]
        schemas = [alternative for each in below if each for alternative in alternatives(each)]
    return sorted({value for each in schemas for value in each.get("enum", ())} - {""})


def _json_type_names(match: re.Match[str]) -> str:
    return " or ".join(JSON_TYPES.get(name, name) for name in match[0].strip("`").split(" | "))


@cache
def schema_of(kind: type) -> tuple[JsonObject, JsonObject]:
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")
    return schema, components
