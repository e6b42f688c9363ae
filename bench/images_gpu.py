"""Prompts with images on one GPU: Qwen3-VL-8B's shape in bfloat16, random weights, greedy.

    python bench/images_gpu.py llmc WORK_DIR            writes the model and compiles it
    python bench/images_gpu.py transformers WORK_DIR    generate() with SDPA
    python bench/images_gpu.py vllm WORK_DIR            where vLLM can be imported

All print the same tables, to be run one after the other on one machine. TTFT: one prompt of 128
tokens of text and images of noise, decoded from no file, other ones in each run; medians of --runs,
after 3. `preprocessing` makes patches and token ids of a prompt, `encoder` is measured alone with
the same images, and `rest` is TTFT without both: prefill, and what the host does for it. vLLM's
TTFT is not divided.
Throughput: 64 requests at once, with an image of 1024 × 1024 each and 64 tokens out, preprocessing
included; the median of 3 runs, after one.
Encoder: images given at once; `kernels` is the time that the GPU is busy, without copies. The GEMM
limit is the time of torch's products of the shapes of its linear layers, and attention's is that of
its operations at these products' rate.
At the end: how many first tokens are equal to those of the sides before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_model
import numpy as np
import torch
from PIL import Image

IMAGE_PAD, VIDEO_PAD, VISION_START, VISION_END = 151655, 151656, 151652, 151653
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>",
           "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
           "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
TEXT: dict[str, Any] = dict(
    model_type="qwen3_vl_text", hidden_size=4096, num_hidden_layers=36, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, intermediate_size=12288, vocab_size=151936,
    max_position_embeddings=262144, rms_norm_eps=1e-6, hidden_act="silu", rope_theta=5e6,
    rope_scaling=dict(rope_type="default", mrope_section=[24, 20, 20], mrope_interleaved=True),
    attention_bias=False, bos_token_id=151643, eos_token_id=151645)
VISION: dict[str, Any] = dict(
    model_type="qwen3_vl", depth=27, hidden_size=1152, num_heads=16, intermediate_size=4304,
    patch_size=16, spatial_merge_size=2, temporal_patch_size=2, in_channels=3, out_hidden_size=4096,
    num_position_embeddings=2304, deepstack_visual_indexes=[8, 16, 24],
    hidden_act="gelu_pytorch_tanh")
TINY: dict[str, dict[str, Any]] = {
    "text": dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
                 head_dim=32, intermediate_size=96,
                 rope_scaling=TEXT["rope_scaling"] | {"mrope_section": [6, 5, 5]}),
    "vision": dict(depth=3, hidden_size=64, num_heads=2, intermediate_size=96, out_hidden_size=64,
                   num_position_embeddings=144, deepstack_visual_indexes=[0, 1, 2])}
PROCESSOR = dict(
    processor_class="Qwen3VLProcessor", image_processor_type="Qwen2VLImageProcessorFast",
    size=dict(longest_edge=2048 * 2048, shortest_edge=65536), patch_size=16, temporal_patch_size=2,
    merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
VIDEO_PROCESSOR = PROCESSOR | dict(video_processor_type="Qwen3VLVideoProcessor")
TOKENIZER = dict(tokenizer_class="Qwen2Tokenizer", bos_token=None, eos_token="<|im_end|>",
                 pad_token="<|endoftext|>", unk_token=None, add_prefix_space=False)

TEXT_TOKENS, AT_ONCE, NEW, LONGEST = 128, 64, 64, 8192
WARM_UPS = 3
ENCODED = (1, 4, 16)
Prompt = tuple[list[int], list[Image.Image]]  # with an IMAGE_PAD for each image
Tokens = list[list[int]]


@dataclass(frozen=True)
class Side:
    """What runs prompts.

    Args:
        preprocess: makes prompts ready.
        generate: takes these and a number of tokens.
        encode: takes these and runs the image encoder alone; None: not to be had.
    """

    preprocess: Callable[[Sequence[Prompt]], Any]
    generate: Callable[[Any, int], Tokens]
    encode: Callable[[Any], object] | None = None


def prompt_of(count: int, edge: int, number: int) -> Prompt:
    """A prompt with `count` images amid its text; each number has other ones."""
    rng = np.random.default_rng((count, edge, number))
    text = rng.integers(256, 150000, TEXT_TOKENS).tolist()
    ids = text[:TEXT_TOKENS // 2] + count * [VISION_START, IMAGE_PAD, VISION_END] \
        + text[TEXT_TOKENS // 2:]
    pixels = rng.integers(0, 256, (count, edge, edge, 3), dtype=np.uint8)
    return ids, [Image.fromarray(own) for own in pixels]


def prompts_of(run: int, number: int, edge: int) -> list[Prompt]:
    """Prompts of a run, with one image each."""
    return [prompt_of(1, edge, 1000 * (run + 1) + index) for index in range(number)]


def described(tiny: bool, layers: int | None) -> dict[str, Any]:
    """The model's config.json."""
    text, vision = ({**own, **(TINY[kind] if tiny else {})}
                    for kind, own in (("text", TEXT), ("vision", VISION)))
    if layers is not None:
        text["num_hidden_layers"] = vision["depth"] = layers
        vision["deepstack_visual_indexes"] = [*range(min(3, layers - 1))]
    return dict(architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl",
                text_config=text, vision_config=vision, image_token_id=IMAGE_PAD,
                video_token_id=VIDEO_PAD, vision_start_token_id=VISION_START,
                vision_end_token_id=VISION_END, tie_word_embeddings=False)


def write_model(directory: Path, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Write the model's directory with its processor, and a tokenizer of as many tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    bench_model.write_as(directory, config, dtype)
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"w{index}" for index in range(len(words), config["text_config"]["bos_token_id"])]
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    assert tokenizer.token_to_id("<|image_pad|>") == IMAGE_PAD
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, fields in (("tokenizer_config", TOKENIZER), ("preprocessor_config", PROCESSOR),
                         ("video_preprocessor_config", VIDEO_PROCESSOR)):
        (directory / f"{name}.json").write_text(json.dumps(fields))


def linear_layers(vision: dict[str, Any], patches: int) -> list[tuple[int, int, int, int]]:
    """The encoder's linear layers: how many, rows of their input, its width, and theirs."""
    hidden, inner, depth = (vision[name] for name in ("hidden_size", "intermediate_size", "depth"))
    merged = hidden * vision["spatial_merge_size"]**2
    patch = vision["in_channels"] * vision["temporal_patch_size"] * vision["patch_size"]**2
    mergers = 1 + len(vision["deepstack_visual_indexes"])
    rows = patches // vision["spatial_merge_size"]**2
    return [(1, patches, patch, hidden), (depth, patches, hidden, 3 * hidden),
            (depth, patches, hidden, hidden), (depth, patches, hidden, inner),
            (depth, patches, inner, hidden), (mergers, rows, merged, merged),
            (mergers, rows, merged, vision["out_hidden_size"])]


def encoder_limits(vision: dict[str, Any], images: int, edge: int) -> tuple[float, float]:
    """Seconds of the encoder's linear layers alone, and with attention's operations."""
    patches = (edge // vision["patch_size"])**2
    layers = linear_layers(vision, images * patches)
    seconds = sum(many * bench_model.gemm_seconds(*shape) for many, *shape in layers)
    operations = sum(2 * many * count * width * rows for many, count, width, rows in layers)
    attention = 4 * images * patches**2 * vision["hidden_size"] * vision["depth"]
    return seconds, seconds * (1 + attention / operations)


def time_to_first_token(side: Side, large: int, small: int, runs: int) -> dict[str, int]:
    """Print the table of TTFT; return the first token of each prompt."""
    print("| images | TTFT (ms) | preprocessing | encoder | rest |\n"
          "| --- | --- | --- | --- | --- |")
    tokens = {}
    for count, edge in ((1, large), (1, small), (4, large)):
        times = []
        for run in range(WARM_UPS + runs):
            prompts = [prompt_of(count, edge, run)]
            start = time.perf_counter()
            ready = side.preprocess(prompts)
            begun = time.perf_counter()
            (tokens[f"{count} of {edge}, {run}"],), = side.generate(ready, 1)
            end = time.perf_counter()
            if side.encode is not None:
                side.encode(ready)
            encoded = time.perf_counter() - end
            if run >= WARM_UPS:
                times.append((end - start, begun - start, encoded, end - begun - encoded))
        whole, *parts = (statistics.median(own) * 1e3 for own in zip(*times, strict=True))
        cells = [f"{part:.1f}" for part in parts] if side.encode else [""] * 3
        print(f"| {count} of {edge} × {edge} | {whole:.1f} | {' | '.join(cells)} |", flush=True)
    return tokens


def throughput(side: Side, edge: int) -> None:
    print("\n| requests | images/s | output tokens/s | preprocessing (s) |\n"
          "| --- | --- | --- | --- |")
    times = []
    for run in range(4):
        prompts = prompts_of(run, AT_ONCE, edge)
        start = time.perf_counter()
        ready = side.preprocess(prompts)
        begun = time.perf_counter()
        made = side.generate(ready, NEW)
        if run:
            times.append((time.perf_counter() - start, begun - start))
        assert [len(own) for own in made] == [NEW] * AT_ONCE
    seconds, before = (statistics.median(own) for own in zip(*times, strict=True))
    print(f"| {AT_ONCE} | {AT_ONCE / seconds:.1f} | {AT_ONCE * NEW / seconds:.0f} | "
          f"{f'{before:.2f}' if side.encode else ''} |", flush=True)


def encoder(side: Side, edge: int, vision: dict[str, Any], runs: int) -> None:
    assert side.encode is not None
    print("\n| encoded | ms | kernels | GEMM limit | share of it, by kernels | with attention |\n"
          "| --- | --- | --- | --- | --- | --- |")
    for count in ENCODED:
        ready = side.preprocess(prompts_of(count, count, edge))
        times = []
        for _ in range(WARM_UPS + runs):
            start = time.perf_counter()
            side.encode(ready)
            times.append(time.perf_counter() - start)
        cells = [""] * 4
        if torch.cuda.is_available():
            _, kernels, _ = bench_model.kernel_times(
                lambda encode=side.encode, ready=ready: encode(ready))  # type: ignore[misc]
            busy = sum(spent for name, spent in kernels.items() if not name.startswith("Mem"))
            alone, attending = encoder_limits(vision, count, edge)
            cells = [f"{busy * 1e3:.2f}", f"{alone * 1e3:.2f}", f"{alone / busy:.0%}",
                     f"{attending / busy:.0%}"]
        print(f"| {count} of {edge} × {edge} | "
              f"{statistics.median(times[WARM_UPS:]) * 1e3:.2f} | {' | '.join(cells)} |",
              flush=True)


@contextmanager
def llmc_side(hf: Path, case: Path, target: str) -> Iterator[Side]:
    import llmc
    from llmc.runtime.engines.cuda_image_encoder import load_image_encoder
    from llmc.runtime.engines.image_encoder import ImageEncoder

    print(bench_model.environment("torch"), target, "\n", flush=True)
    with llmc.LLM(case, max_batch_size=AT_ONCE, verify=False, prefix_reuse=False,
                  gpu_memory_utilization=0.8) as llm:
        threads = len(os.sched_getaffinity(0))
        alone = load_image_encoder(llm.manifest, case, threads, 0) if target == "cuda" \
            else ImageEncoder(llm.manifest, case, threads)

        def generate(prompts: Any, count: int) -> Tokens:
            params = llmc.SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
            return [list(own.token_ids) for own in llm.generate(prompts, params)]

        yield Side(lambda prompts: [llm.media_prompt(ids, images=images)
                                    for ids, images in prompts], generate,
                   lambda prompts: [alone.encode(own.item) for prompt in prompts
                                    for own in prompt.ranges])


@contextmanager
def transformers_side(hf: Path, case: Path, target: str) -> Iterator[Side]:
    import transformers
    from transformers import AutoImageProcessor, AutoModelForImageTextToText

    device = "cuda" if target == "cuda" else "cpu"
    processor = AutoImageProcessor.from_pretrained(hf)
    model = AutoModelForImageTextToText.from_pretrained(
        hf, dtype="auto", attn_implementation="sdpa").to(device).eval()
    print("transformers", transformers.__version__, "torch", torch.__version__,
          type(processor).__name__, target, "\n", flush=True)

    def preprocess(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
        made = processor(images=[image for _, own in prompts for image in own],
                         return_tensors="pt", device=device)
        counts = iter((made["image_grid_thw"].prod(1) // processor.merge_size**2).tolist())
        rows = [[token for given in ids for token in
                 [given] * (next(counts) if given == IMAGE_PAD else 1)] for ids, _ in prompts]
        ids = torch.tensor(rows, device=device)
        if device == "cuda":
            torch.cuda.synchronize()
        return {**made.to(device), "input_ids": ids, "attention_mask": torch.ones_like(ids),
                "mm_token_type_ids": (ids == IMAGE_PAD).int()}

    def generate(given: dict[str, torch.Tensor], count: int) -> Tokens:
        made = model.generate(**given, max_new_tokens=count, do_sample=False, eos_token_id=None,
                              pad_token_id=0)
        return made[:, given["input_ids"].shape[1]:].tolist()  # type: ignore[no-any-return]

    def encode(given: dict[str, torch.Tensor]) -> None:
        model.get_image_features(given["pixel_values"], given["image_grid_thw"])
        if device == "cuda":
            torch.cuda.synchronize()

    with torch.inference_mode():
        yield Side(preprocess, generate, encode)


@contextmanager
def vllm_side(hf: Path, case: Path, target: str) -> Iterator[Side]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import vllm
    from vllm import LLM, SamplingParams

    print("vllm", vllm.__version__, "torch", torch.__version__, "\n", flush=True)
    llm = LLM(model=str(hf), dtype="bfloat16", max_num_seqs=AT_ONCE, max_model_len=LONGEST, seed=0,
              disable_log_stats=True, enable_prefix_caching=False, gpu_memory_utilization=0.8,
              limit_mm_per_prompt={"image": 4, "video": 0}, attention_backend="FLASH_ATTN",
              enable_flashinfer_autotune=False)

    def generate(prompts: Any, count: int) -> Tokens:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True,
                                detokenize=False)
        made = llm.generate([{"prompt_token_ids": ids, "multi_modal_data": {"image": images}}
                             for ids, images in prompts], params, use_tqdm=False)
        return [list(own.outputs[0].token_ids) for own in made]

    yield Side(lambda prompts: prompts, generate)


SIDES = {"llmc": llmc_side, "transformers": transformers_side, "vllm": vllm_side}


def prepare(arguments: argparse.Namespace, config: dict[str, Any]) -> tuple[Path, Path, str]:
    """Write the model and, for llmc, compile it, where that is not done yet."""
    target = "cpu" if arguments.tiny else "cuda"
    dtype = "float32" if arguments.tiny else "bfloat16"
    name = f"qwen3-vl-{config['text_config']['hidden_size']}-" \
           f"{config['text_config']['num_hidden_layers']}"
    hf, case = arguments.work / name, arguments.work / f"{name}-case"
    start = time.perf_counter()
    if not (hf / "tokenizer_config.json").is_file():
        write_model(hf, config, getattr(torch, dtype))
    written = time.perf_counter()
    if arguments.side == "llmc" and not case.is_dir():
        import llmc

        llmc.compile(hf, case, dtype=dtype, target=target, max_seq_len=LONGEST)
    if arguments.compile_only:
        print(f"written in {written - start:.0f} s, compiled in "
              f"{time.perf_counter() - written:.0f} s", flush=True)
    return hf, case, target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=[*SIDES])
    parser.add_argument("work", type=Path)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--layers", type=int,
                        help="Of the language model and of the encoder, for a dry run.")
    parser.add_argument("--compile_only", action="store_true")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # on the CPU
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    config = described(arguments.tiny, arguments.layers)
    hf, case, target = prepare(arguments, config)
    if arguments.compile_only:
        return
    large, small = (320, 256) if arguments.tiny else (1024, 448)
    with SIDES[arguments.side](hf, case, target) as side:
        gc.freeze()
        tokens = time_to_first_token(side, large, small, arguments.runs)
        throughput(side, large)
        if side.encode is not None:
            encoder(side, large, config["vision_config"], arguments.runs)
    bench_model.compare_tokens(hf, arguments.side, tokens)


if __name__ == "__main__":
    main()
