"""_peer_generation.py PEER FORMAT FOLDER BATCHES PROMPT: times prefill and decoding of another program on request.

    rwkv           PyPI's package, for an RWKV-4 or RWKV-7 checkpoint (model.pth): float32, bfloat16, int8 (RWKV-4)
    transformers   for huggingface/: float32, bfloat16 (RWKV-4)
    llama.cpp      PyPI's llama-cpp-python, for GGUF files: F32, F16, BF16, Q8_0, Q4_K_M (RWKV-7)
    rwkv.cpp       the library librwkv.so, for ggmf files: FP32, FP16, Q8_0, Q5_1, Q4_0

benchmarks.generation starts this script with the files in FOLDER, in an environment with the peer and without this project.
FOLDER/model.json has the architecture and the path of librwkv.so. A task is a timed function: a prefill, or a decoding step.
The script first prints one line of JSON: the seconds of loading and of the first token, the peak memory, and the number of
tokens of each task by name. For each input line "SECONDS NAME" the script calls the named task for that many seconds, and
prints the mean seconds of a call. All peers use two threads, or one on a single core.
"""

import ctypes
import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"RWKV_JIT_ON": "1", "RWKV_CUDA_ON": "0", "HF_HUB_OFFLINE": "1"}

THREADS = min(2, os.cpu_count() or 1)
QUANTISED = {"Q4_K_M": "LLAMA_FTYPE_MOSTLY_Q4_K_M", "Q8_0": "LLAMA_FTYPE_MOSTLY_Q8_0"}
CHUNK = 64                               # rwkv.cpp aborts on longer chunks, because its graph has a limited number of nodes


def model_info(folder):
    return json.loads((folder / "model.json").read_text(encoding="utf-8"))


def limit_threads():
    import torch

    torch.set_num_threads(min(THREADS, torch.get_num_threads()))


class Rwkv:
    """PyPI's rwkv, which processes one row at a time."""

    def __init__(self, folder, dtype, batches, prompt):
        generation7 = model_info(folder)["generation"] == "rwkv7"
        os.environ["RWKV_V7_ON"] = str(int(generation7))
        from rwkv.model import RWKV

        limit_threads()
        strategy = {"float32": "cpu fp32", "bfloat16": "cpu bf16", "int8": "cpu fp32i8"}[dtype]
        if generation7:                  # for RWKV-7, the library appends .pth
            self.model = RWKV(model=str(folder / "model"), strategy=strategy)
        else:
            self.model = RWKV(model=str(folder / "model.pth"), strategy=strategy, verbose=False)
        self.tokens = list(range(prompt))
        _, self.state = self.model.forward(self.tokens[:8], None)

    def prefill(self):
        self.model.forward(self.tokens, None)

    def decode(self, _):
        return lambda: self.model.forward(self.tokens[:1], self.state)

    batches = (1,)


class Transformers:
    def __init__(self, folder, dtype, batches, prompt):
        import torch
        from transformers import RwkvForCausalLM

        limit_threads()
        torch.set_grad_enabled(False)
        self.batches = batches
        self.model = RwkvForCausalLM.from_pretrained(folder / "huggingface", dtype=getattr(torch, dtype)).eval()
        self.tokens = torch.arange(prompt)[None]
        self.model(self.tokens[:, :8], use_cache=True)

    def prefill(self):
        self.model(self.tokens, use_cache=True)

    def decode(self, B):
        tokens = self.tokens[0, :B, None]
        state = self.model(tokens.expand(B, 2), use_cache=True).state
        return lambda: self.model(tokens, state=state, use_cache=True)


class LlamaCpp:
    """llama.cpp through its low-level interface, because the high-level interface accepts a single row.

    A decoding step computes the logits of all rows. A prefill computes only the logits of the last token.
    """

    def __init__(self, folder, name, batches, prompt):
        import llama_cpp

        self.api = llama_cpp
        self.batches = batches
        self.prompt = prompt
        self.vocabulary = 256
        self.position = 0
        llama_cpp.llama_log_set(SILENT, ctypes.c_void_p(0))
        model = llama_cpp.llama_model_load_from_file(str(self._file(folder, name)).encode(),
                                                     llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = 1 << 20
        options.n_batch = max(prompt, *batches)
        options.n_ubatch = max(prompt, *batches)
        options.n_seq_max = max(batches)
        options.n_threads = options.n_threads_batch = THREADS
        self.context = llama_cpp.llama_init_from_model(model, options)
        self.batch = llama_cpp.llama_batch_init(max(prompt, *batches), 0, 1)
        self._read(8, rows=1)

    def _file(self, folder, name):
        path = folder / f"{name}.gguf"
        if not path.exists():
            options = self.api.llama_model_quantize_default_params()
            options.ftype = getattr(self.api, QUANTISED[name])
            options.nthread = THREADS
            if self.api.llama_model_quantize(str(folder / "F32.gguf").encode(), str(path).encode(), options):
                raise SystemExit(f"llama.cpp could not quantise its file to {name}")
        return path

    def _read(self, tokens, rows):
        """Decodes `tokens` tokens of one row, or one token of each of several rows."""
        self.batch.n_tokens = tokens
        for index in range(tokens):
            self.batch.token[index] = index % self.vocabulary
            self.batch.pos[index] = self.position + (index if rows == 1 else 0)
            self.batch.n_seq_id[index] = 1
            self.batch.seq_id[index][0] = index if rows > 1 else 0
            self.batch.logits[index] = rows > 1 or index == tokens - 1
        self.position += tokens if rows == 1 else 1
        if self.api.llama_decode(self.context, self.batch):
            raise SystemExit("llama.cpp could not read the tokens")
        if not self.api.llama_get_logits_ith(self.context, -1):
            raise SystemExit("llama.cpp returned no logits")

    def _forget(self):
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.position = 0

    def prefill(self):
        self._forget()
        self._read(self.prompt, rows=1)

    def decode(self, B):
        self._forget()
        return lambda: self._read(B, rows=B)


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def SILENT(level, text, user_data):
    pass


class RwkvCpp:
    batches = (1,)

    def __init__(self, folder, name, batches, prompt):
        library = ctypes.CDLL(model_info(folder)["rwkv.cpp"])
        library.rwkv_init_from_file.restype = ctypes.c_void_p
        for function in ("rwkv_get_state_len", "rwkv_get_logits_len"):
            getattr(library, function).restype = ctypes.c_size_t
        self.context = ctypes.c_void_p(library.rwkv_init_from_file(self._file(library, folder, name), THREADS, 0))
        if not self.context:
            raise SystemExit(f"rwkv.cpp could not load {name}")
        self.library = library
        self.state = (ctypes.c_float * library.rwkv_get_state_len(self.context))()
        self.logits = (ctypes.c_float * library.rwkv_get_logits_len(self.context))()
        self.tokens = (ctypes.c_uint32 * prompt)(*range(prompt))
        self._token(None)

    def _file(self, library, folder, name):
        path = folder / f"{name}.ggmf"
        if not path.exists() and not library.rwkv_quantize_model_file(str(folder / "FP32.ggmf").encode(),
                                                                     str(path).encode(), name.encode()):
            raise SystemExit(f"rwkv.cpp could not quantise its file to {name}")
        return str(path).encode()

    def _token(self, state):
        if not self.library.rwkv_eval(self.context, self.tokens[0], state, self.state, self.logits):
            raise SystemExit("rwkv.cpp could not read a token")

    def prefill(self):
        if not self.library.rwkv_eval_sequence_in_chunks(self.context, self.tokens, ctypes.c_size_t(len(self.tokens)),
                                                         ctypes.c_size_t(CHUNK), None, self.state, self.logits):
            raise SystemExit("rwkv.cpp could not read the tokens")

    def decode(self, _):
        return lambda: self._token(self.state)


PEERS = {"rwkv": Rwkv, "transformers": Transformers, "llama.cpp": LlamaCpp, "rwkv.cpp": RwkvCpp}


def main(name, form, folder, batches, prompt):
    began = time.perf_counter()
    peer = PEERS[name](Path(folder), form, [int(B) for B in batches.split(",")], int(prompt))
    load_s = time.perf_counter() - began
    began = time.perf_counter()
    peer.prefill()
    first_token_s = time.perf_counter() - began
    tasks = {f"decode, batch {B}": (B, lambda B=B: peer.decode(B)) for B in peer.batches}
    tasks[f"prefill {prompt}"] = int(prompt), lambda: peer.prefill
    status = Path("/proc/self/status").read_text(encoding="ascii")           # getrusage would include the parent's peak
    peak_mib = int(status.split("VmHWM:")[1].split()[0]) / 1024
    print(json.dumps({"load_s": load_s, "first_token_s": first_token_s, "peak_mib": peak_mib,
                      "tasks": {task: tokens for task, (tokens, _) in tasks.items()}}), flush=True)
    for line in sys.stdin:
        seconds, task = line.rstrip("\n").split(" ", 1)
        print(mean_seconds(tasks[task][1](), float(seconds)), flush=True)


def mean_seconds(function, least):
    calls = 0
    began = time.perf_counter()
    while calls == 0 or time.perf_counter() - began < least:
        function()
        calls += 1
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    main(*sys.argv[1:])
