"""Draft models for tests: requests, references, and steps whose drafts engines must agree on."""

import json
import re
import threading

import conftest
import eagle3
import families
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import (
    DFlashTokenCandidateGenerator,
    SinglePositionMultiTokenCandidateGenerator,
)
from transformers.modeling_layers import MtpModel
from transformers.models.muse_glimmer_assistant.configuration_muse_glimmer_assistant import (
    MuseGlimmerAssistantConfig,
)
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import (
    MuseGlimmerAssistantModel,
)

import llmc
from llmc.runtime.core.step import SamplingState, Step
from llmc.runtime.sampling.sampler import Sampler

VOCAB, ROWS, LAYERS = 300, 120, 6
PROMPTS = [[42, 41, 239, 151, 178, 181, 214], [11, 147], [46, 122, 278, 165, 23],
           [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 9, 10, 11, 12, 13, 14, 15]]
PARAMS = {"greedy": {}, "sampled": dict(temperature=0.9, top_k=40, seed=7),
          "several": dict(temperature=1.1, seed=3, n=3, logprobs=2),
          "structured": dict(guided_regex="(ab|c)+d{2,9}", temperature=1.0, seed=4),
          "scored": dict(prompt_logprobs=1)}
# A KV cache that is full, small blocks, and prompts in chunks.
TIGHT = dict(block_size=4, kv_cache_tokens=96, max_num_batched_tokens=8)


def params(name, **changes):
    ending = {} if name == "structured" else dict(ignore_eos=True)
    return llmc.SamplingParams(**{"max_tokens": 20, **ending, **PARAMS[name], **changes})


def save_base(directory):
    """Save a tiny model; return it."""
    families.save(families.tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=LAYERS),
                  directory)
    conftest.write_tokenizer(directory)
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager").eval()


def head_of(base):
    """A random EAGLE-3 draft model."""
    return eagle3.Eagle3(64, VOCAB, ROWS, base.get_input_embeddings().weight.detach())


def save_small(directory):
    """Save a smaller model with the same vocabulary; return it."""
    drafter = families.tiny_model("qwen3", vocab_size=VOCAB, num_hidden_layers=2, hidden_size=48)
    families.save(drafter, directory)
    return drafter


def equal(got, expected):
    assert [(own.token_ids, own.text, own.finish_reason) for own in got] == \
        [(own.token_ids, own.text, own.finish_reason) for own in expected]


def assert_drafts(llm, base, reference, prompt, proposed, count=4):
    """Compare all drafts of a greedy generation with the reference's argmax chain."""
    proposed.clear()
    own, = llm.generate([prompt], llmc.SamplingParams(max_tokens=16, ignore_eos=True))
    tokens, given = [*prompt, *own.token_ids], len(prompt) + 1
    for drafts in proposed:
        if drafts:
            assert drafts == reference(base, tokens[:given], len(drafts)), (given, drafts)
        following = tokens[given:]
        given += 1 + next((index for index, pair in enumerate(zip(drafts, following, strict=False))
                           if pair[0] != pair[1]), min(len(drafts), len(following)))
    assert max(map(len, proposed)) == count
    assert len(proposed) >= 4


def assert_drafts_of_prompts(llm, base, reference, proposed):
    """Compare the drafts after several prompts, some with a cached prefix, with the reference's."""
    for prompt in (*PROMPTS, PROMPTS[3], [*PROMPTS[3][:8], 60, 61], [*PROMPTS[3][:9], 62, 63]):
        assert_drafts(llm, base, reference, prompt, proposed)
    assert llm.metrics()["cache_hits"] > 8


def assert_reaches_the_end(llm, alone):
    """Generate to the maximum number of positions, beside a shorter sequence."""
    wish = [llmc.SamplingParams(max_tokens=count, ignore_eos=True) for count in (57, 62, 9, 47)]
    equal(llm.generate(PROMPTS, wish), alone.generate(PROMPTS, wish))


def assert_aborts_leave_others(llm, expected):
    """Compare the greedy generations of all prompts, beside aborted ones."""
    def abandon():
        for _ in range(4):
            stream = llm.stream(PROMPTS[3], params("greedy"))
            next(stream)
            stream.close()

    other = threading.Thread(target=abandon)
    other.start()
    equal(llm.generate(PROMPTS, params("greedy")), expected)
    other.join()


def assert_draws_beside_others(llm, alone, plain):
    """Compare beams, logits, predictions and ends beside drafts with those without drafts."""
    wish = [params("greedy", beam_width=3, max_tokens=8), params("greedy"),
            params("greedy", beam_width=3, max_tokens=8), params("greedy")]
    equal(llm.generate(PROMPTS, wish), alone.generate(PROMPTS, wish))
    for own, other in zip(*(each.logits(PROMPTS[3]) for each in (alone, llm)), strict=True):
        assert np.allclose(own, other, atol=1e-4)
    equal(llm.generate(PROMPTS, params("greedy", prediction=[1, 2, 3])), plain)
    assert_reaches_the_end(llm, alone)
    equal(llm.generate(PROMPTS, params("greedy")), plain)


def save_with_mtp(family, directory, number=1):
    """Save a tiny model with MTP layers in the published layout; return both."""
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    sizes = {**families.sizes_of(family), "layer_types": kinds} if family == "mellum" else {}
    base = families.tiny_model(family, **{**sizes, "vocab_size": VOCAB, "num_mtp_layers": number,
                                          "tie_word_embeddings": False})
    layers = families.randomized(MtpModel(base, number))
    families.save(base, directory)
    conftest.write_tokenizer(directory)
    count, stored = base.config.num_hidden_layers, load_file(directory / "model.safetensors")
    for name, tensor in layers.state_dict().items():
        if not name.startswith("layers."):
            continue  # the model's
        name = re.sub(r"^layers\.(\d+)\.(mtp_block\.)?",
                      lambda found: f"model.layers.{count + int(found[1])}.", name)
        name = name.replace(".post_norm.", ".shared_head.norm.")
        stem, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            for expert, pair in enumerate(tensor):
                for part, rows in zip(("gate_proj", "up_proj"), pair.chunk(2), strict=True):
                    stored[f"{stem}.{expert}.{part}.weight"] = rows.clone()
        elif leaf == "down_proj":
            for expert, matrix in enumerate(tensor):
                stored[f"{stem}.{expert}.down_proj.weight"] = matrix.clone()
        else:
            stored[name] = tensor.clone()
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    return base, layers


@torch.no_grad()
def mtp_drafts(layers, base, tokens, count):
    """Drafts after the last token by transformers' MTP layers, then by the last on its results."""
    hidden = base.model(torch.tensor([tokens[:-1]])).last_hidden_state
    shifted, places = torch.tensor([tokens[1:]]), torch.arange(1, len(tokens))[None]
    drafts = layers(shifted, hidden, None, places, None)[0][0].tolist()
    last = len(layers.layers) - 1
    for layer in range(last):
        hidden = layers.forward_layer(layer, hidden, places, None, input_ids=shifted)
        shifted = torch.cat([shifted[:, 1:], torch.tensor([drafts[layer:layer + 1]])], 1)
    for _ in range(count - last - 1):
        out = layers.forward_layer(last, hidden, torch.arange(1, shifted.shape[1] + 1)[None], None,
                                   input_ids=shifted)
        hidden = torch.cat([hidden, out[:, -1:]], 1)
        shifted = torch.cat([shifted, torch.tensor([drafts[-1:]])], 1)
        out = layers.forward_layer(last, hidden, torch.arange(1, shifted.shape[1] + 1)[None], None,
                                   input_ids=shifted)
        drafts.append(int(layers._project_to_logits(out)[0, -1].argmax()))
    return drafts[:count]


@torch.no_grad()
def greedy(drafter, tokens, count):
    """Drafts after the last token by a causal LM."""
    drafts = []
    for _ in range(count):
        drafts.append(int(drafter(torch.tensor([[*tokens, *drafts]])).logits[0, -1].argmax()))
    return drafts


class Steps:
    """Steps of an engine with a draft model, in which sequences verify given drafts.

    Args:
        engine: with slots for 4 sequences and blocks for 64 positions of each.

    Attributes:
        results: tokens, counts and drafts of each step, as lists.
    """

    def __init__(self, engine):
        self._engine, self._size = engine, engine.limits.block_size
        self._past = [0] * 4
        self.known = [[] for _ in range(4)]
        self.results = []

    def run(self, rows, propose):
        """Run a step.

        Args:
            rows: by slot, prompt tokens to add; or the drafts of a decoding sequence, as a tuple.
                A prompt that ends with None goes on with the tokens after it.
            propose: see `Step`.
        """
        tokens, drafts, sample, following, admit = {}, {}, [], {}, {}
        for slot, given in rows.items():
            if isinstance(given, tuple):
                tokens[slot], drafts[slot] = [self.known[slot][-1], *given], len(given)
            else:
                cut = given.index(None) if None in given else len(given)
                tokens[slot], drafts[slot] = given[:cut], 0
                following[slot] = given[cut + 1] if cut < len(given) else -1
                self.known[slot] += given[:cut]
                if not self._past[slot]:
                    admit[slot] = SamplingState(Sampler(llmc.SamplingParams()))
        order = sorted(rows, key=lambda slot: len(tokens[slot]) > 1)
        sample = [index for index, slot in enumerate(order) if following.get(slot, -1) < 0]
        blocks = 64 // self._size
        output = self._engine.collect(self._engine.submit(Step.of(
            [tokens[slot] for slot in order], [self._past[slot] for slot in order],
            [range(slot * blocks, (slot + 1) * blocks) for slot in order], order, sample=sample,
            num_drafts=[drafts[slot] for slot in order], admit=admit, propose=propose,
            next_tokens=np.array([following.get(slot, -1) for slot in order], np.int64))))
        counts = [1] * len(sample) if output.counts is None else output.counts.tolist()
        starts = np.cumsum([0, *counts])
        for index, slot in enumerate(order):
            self._past[slot] += len(tokens[slot])
            if index in sample:
                place = sample.index(index)
                own = output.tokens[starts[place]:starts[place + 1]].tolist()
                self._past[slot] += len(own) - 1 - drafts[slot]
                self.known[slot] += own
        self.results.append((output.tokens.tolist(), counts, output.drafts.tolist()))


def drafts_of_steps(engine, answers):
    """Run steps with chunks, drafts of every kind and the last positions; see `Steps.results`.

    Args:
        answers: greedy tokens after each of PROMPTS, at least 12.
    """
    steps, (a, b, c, d) = Steps(engine), answers
    wrong = [(token + 1) % VOCAB for token in a]
    steps.run({0: PROMPTS[0], 3: [*PROMPTS[3][:8], None, PROMPTS[3][8]]}, 3)
    steps.run({0: (a[1], wrong[2], a[3]), 3: [PROMPTS[3][8], None, PROMPTS[3][9]]}, 2)
    steps.run({0: (a[3], a[4], a[5]), 1: PROMPTS[1], 3: PROMPTS[3][9:]}, 3)
    steps.run({0: (), 1: tuple(b[1:4]), 3: (d[1], wrong[2], d[3])}, 4)  # rows of drafts
    steps.run({0: (), 1: (), 2: PROMPTS[2], 3: ()}, 0)
    steps.run({0: (), 1: (), 2: tuple(c[1:3]), 3: ()}, 3)
    steps.run({0: (), 1: (), 2: (), 3: ()}, 1)
    steps.run({1: (), 3: (wrong[0],)}, 4)
    long = Steps(engine)
    long.run({0: [7 + token % 200 for token in range(60)], 2: PROMPTS[2]}, 4)
    for _ in range(4):  # to the last position
        long.run({0: (), 2: ()}, 4)
    long.run({2: ()}, 4)
    return steps.results + long.results


# Layers of a model with recurrent state; the last one is like the MTP layer.
KINDS = [*["linear_attention"] * 3, "full_attention"]
QWEN_NAMES = {"layers.0.eh_proj.": "mtp.fc.", "layers.0.enorm.": "mtp.pre_fc_norm_embedding.",
              "layers.0.hnorm.": "mtp.pre_fc_norm_hidden.", "layers.0.post_norm.": "mtp.norm.",
              "layers.0.mtp_block.": "mtp.layers.0."}


def save_recurrent(family, directory, **changes):
    """Save a tiny model with recurrent layers and its MTP layer as Qwen does; return both."""
    own = {"num_mtp_layers": 1, "mtp_layer_types": ["full_attention"]}
    base = families.tiny_model(family, vocab_size=VOCAB, layer_types=KINDS,
                               tie_word_embeddings=family == "qwen3_5_text", **own, **changes)
    layers = families.randomized(MtpModel(base, 1))
    families.save(base, directory)
    conftest.write_tokenizer(directory)
    stored = load_file(directory / "model.safetensors")
    for name, tensor in layers.state_dict().items():
        prefix = next((prefix for prefix in QWEN_NAMES if name.startswith(prefix)), None)
        if prefix is None:
            continue  # the model's
        name = name.replace(prefix, QWEN_NAMES[prefix])
        if not name.endswith(("gate_up_proj", "down_proj")) or family == "qwen3_5_moe_text":
            stored[name] = tensor.clone()  # experts may be stored in one tensor
            continue
        stem = name.rpartition(".")[0]
        for expert, matrix in enumerate(tensor):
            parts = {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[1]} \
                if name.endswith("gate_up_proj") else {"down_proj": matrix}
            stored |= {f"{stem}.{expert}.{part}.weight": rows.clone()
                       for part, rows in parts.items()}
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(
        {key: value for key, value in config.items() if key not in own}))
    return base, layers


# A cut of Gemma 4 with and without layers that share caches, and its assistant.
GEMMA = dict(vocab_size=VOCAB, sliding_window=6, vocab_size_per_layer_input=VOCAB)


def compile_assistant(directory, changes):
    """Compile a tiny Gemma 4 with its assistant for cuda, as `case`; return both models."""
    sizes = {**families.OWN_ATTENTION["gemma4_text"], **changes, **GEMMA}
    base = families.tiny_model("gemma4_text", **sizes)
    families.save(base, directory / "hf")
    conftest.write_tokenizer(directory / "hf")
    assistant = save_assistant(base, sizes, directory / "assistant")
    llmc.compile(directory / "hf", directory / "case", draft=f"assistant:{directory / 'assistant'}",
                 target="cuda", dtype="float32")
    return base, assistant


def save_assistant(base, sizes, directory, **changes):
    """Save an assistant of a Gemma 4 model of these sizes; return it."""
    text = {**{name: value for name, value in sizes.items() if name in (
        "vocab_size", "sliding_window", "num_key_value_heads", "num_global_key_value_heads",
        "head_dim", "global_head_dim", "attention_k_eq_v", "max_position_embeddings",
        "rope_parameters")},
        "model_type": "gemma4_text", "hidden_size": 32, "intermediate_size": 48,
        "num_attention_heads": 4, "num_hidden_layers": 3, "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
        "enable_moe_block": False, "use_double_wide_mlp": False,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        **changes.pop("text", {})}
    made = AutoConfig.for_model("gemma4_assistant", text_config=text, **{
        "backbone_hidden_size": base.config.hidden_size, "num_centroids": 30, **changes})
    assistant = families.randomized(AutoModelForCausalLM.from_config(
        made, attn_implementation="eager"))
    if assistant.masked_embedding is not None:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(
            VOCAB, generator=torch.Generator().manual_seed(2)))
    families.save(assistant, directory)
    return assistant


@torch.no_grad()
def assistant_drafts(assistant, base, tokens, count):
    """Drafts after the last token by transformers' candidate generator."""
    options = GenerationConfig(max_length=1000)
    assistant.generation_config.num_assistant_tokens = count
    drafter = SinglePositionMultiTokenCandidateGenerator(
        assistant, base.get_input_embeddings(), options)
    read = torch.tensor([tokens[:-1]])
    outputs = base(read, output_hidden_states=True, return_shared_kv_states=True)
    if not base.config.num_kv_shared_layers:
        caches = DynamicCache()
        base(read, past_key_values=caches)
        outputs["shared_kv_states"] = {kind: (layer.keys, layer.values) for kind, layer in zip(
            base.config.layer_types, caches.layers, strict=True)}
    ids, _ = drafter.get_candidates(torch.tensor([tokens]), {}, outputs, False, 0)
    return ids[0, len(tokens):].tolist()


def save_dflash(directory, layout="transformers", **changes):
    """Save a DFlash draft model in the layout of transformers or of z-lab; return the model."""
    sizes = dict(hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16, block_size=5, mask_token_id=VOCAB - 2,
                 target_layer_ids=[1, 4], max_position_embeddings=64,
                 layer_types=["full_attention"] * 2)
    config = MuseGlimmerAssistantConfig(**{**sizes, **changes})
    config._attn_implementation = "eager"
    drafter = families.randomized(MuseGlimmerAssistantModel(config))
    for layer in drafter.layers:
        for part in (layer.self_attn.q_norm, layer.self_attn.o_proj):
            part.weight.data *= 20  # so that drafts of a block differ
    drafter.save_pretrained(directory)
    if layout == "z-lab":
        stored = load_file(directory / "model.safetensors")
        save_file({name.replace("encoder.output_norm_enc", "hidden_norm").removeprefix("encoder."):
                   tensor for name, tensor in stored.items()}, directory / "model.safetensors")
        plain = json.loads((directory / "config.json").read_text())
        own = {key: plain.pop(key) for key in ("mask_token_id", "target_layer_ids")}
        plain |= dict(model_type="qwen3", use_sliding_window=True, vocab_size=VOCAB,
                      architectures=["DFlashDraftModel"], num_target_layers=LAYERS,
                      dflash_config=own)
        (directory / "config.json").write_text(json.dumps(plain))
    return drafter


@torch.no_grad()
def dflash_drafts(drafter, base, tokens, count):
    """Drafts after the last token by transformers' candidate generator."""
    generator = DFlashTokenCandidateGenerator(
        drafter, base.get_input_embeddings(), base.get_output_embeddings(),
        GenerationConfig(max_length=1000))
    outputs = base(torch.tensor([tokens[:-1]]), output_hidden_states=True)
    ids, _ = generator.get_candidates(
        torch.tensor([tokens]), {"position_ids": torch.arange(len(tokens))[None],
                                 "attention_mask": None}, outputs, False, 0)
    return ids[0, len(tokens):][:count].tolist()
