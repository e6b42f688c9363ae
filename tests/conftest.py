"""Shared fixtures: a tiny model with its case directories, and the CUDA engine if installed."""

import functools
import gc
import os
import shutil
from importlib.util import find_spec

import cores
import export_cache
import families
import margins
import pytest
import speech
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import llmc
from llmc.compiler import api
from llmc.compiler.frontend import load
from llmc.runtime.engines import cuda
from llmc.runtime.speculation.engine_drafts import EngineDrafter

# torch's exporter makes many objects and few cycles: collecting them takes 7 % of a compilation.
gc.set_threshold(100_000, 50, 100)
VOCAB = 300
CHAT_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="session", autouse=True)
def exports_are_kept():
    """Cache exports between tests and runs."""
    with export_cache.installed():
        yield


@pytest.fixture(scope="session", autouse=True)
def graphs_are_valid_onnx():
    """Check the graphs of every written case directory; one graph takes 10 ms."""
    real = api.write

    def checked(*args):
        manifest = real(*args)
        families.assert_valid_onnx(args[-1])
        return manifest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "write", checked)
        yield


def write_tokenizer(directory):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog " * 3],
        trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<pad>", "<s>", "</s>"],
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"eos_token": "</s>", "bos_token": "<s>"}')
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the tests that need llmc-cuda, for `-m extension`."""
    for item in items:
        if "extension" in item.fixturenames:
            item.add_marker("extension")


@pytest.fixture(scope="session")
def extension():
    """The compiled CUDA engine; its host-side checks need no GPU."""
    if find_spec("llmc_cuda") is None:
        pytest.skip("llmc-cuda is not installed")
    return cuda.extension()


@pytest.fixture(scope="session")
def tensorrt(extension):
    """The extension's TensorRT module, which loads without TensorRT."""
    if not hasattr(extension, "tensorrt"):
        pytest.skip("llmc-cuda was built without TENSORRT_ROOT")
    extension.tensorrt.library = os.path.join(os.path.dirname(extension.__file__),
                                              "libllmc_plugins.so")
    return extension.tensorrt


@pytest.fixture(scope="session")
def harness(tensorrt):
    """Harness that calls the plugins in TensorRT's place."""
    return tensorrt.Harness(tensorrt.library)


@pytest.fixture(scope="module")
def one_thread():
    """Use one thread, as torch's threads mostly wait for one another in tiny models."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def all_cores():
    """Let the test use all cores instead of the worker's core."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores.ALL)
    yield cores.ALL
    os.sched_setaffinity(0, own)


@pytest.fixture
def decisive(monkeypatch):
    """Check that no sampled token of the test depends on rounding; see margins."""
    margins.guard(monkeypatch)


@pytest.fixture
def decisive_beams(monkeypatch):
    """Check that no beam of the test depends on rounding."""
    margins.guard_beams(monkeypatch)


@pytest.fixture(scope="session")
def tiny_hf(tmp_path_factory):
    """A tiny Llama as a Hugging Face directory, with a tokenizer. 4 heads, 2 KV heads, 4 layers."""
    directory = tmp_path_factory.mktemp("tiny") / "hf"
    model = families.tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=4)
    families.save(model, directory)
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tiny_hf):
    from transformers import AutoModelForCausalLM
    return AutoModelForCausalLM.from_pretrained(tiny_hf, dtype=torch.float32,
                                                attn_implementation="eager").eval()


@pytest.fixture(scope="session")
def draft_base(tmp_path_factory):
    """A model for draft models: its directory, and the model."""
    from draft_models import save_base
    directory = tmp_path_factory.mktemp("base") / "hf"
    return directory, save_base(directory)


@pytest.fixture(scope="session")
def eagle3_head(draft_base):
    """A random EAGLE-3 draft model of `draft_base`."""
    from draft_models import head_of
    return head_of(draft_base[1])


@pytest.fixture(scope="session")
def small_drafter(tmp_path_factory):
    """A smaller model than `draft_base`: its directory, and the model."""
    from draft_models import save_small
    directory = tmp_path_factory.mktemp("small") / "hf"
    return directory, save_small(directory)


@pytest.fixture
def proposed(monkeypatch):
    """Drafts of each step, whenever the engine returns drafts."""
    seen = []
    real = EngineDrafter.propose
    monkeypatch.setattr(EngineDrafter, "propose", lambda self, tokens, match: (
        seen.append(list(tokens)), real(self, tokens, match))[1])
    return seen


@pytest.fixture
def fully_shared(monkeypatch):
    """Let transformers build assistants, all of whose layers share caches."""
    from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig
    known = Gemma4TextConfig.kv_sharing_modes.fget
    monkeypatch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(
        lambda self: ["reuse"] * self.num_hidden_layers
        if self.num_kv_shared_layers == self.num_hidden_layers else known(self)))


@pytest.fixture(scope="session")
def encoder_decoder(tmp_path_factory):
    """Factory by family name: the tiny model, its export and its case directories."""
    @functools.cache
    def make(name):
        root = tmp_path_factory.mktemp(name)
        model = families.tiny_encoder_decoder(name)
        hf_dir = families.save(model, root / "hf")
        write_word_tokenizer(hf_dir, model.config.eos_token_id)
        raw = load(hf_dir)
        assert not raw.notes, raw.notes
        return model, raw, families.compile_encoder_decoder(raw, root)
    return make


@pytest.fixture(scope="session")
def tiny_speech(tmp_path_factory):
    """A tiny Whisper: the model, its directory and its case directory."""
    root = tmp_path_factory.mktemp("speech")
    model = speech.tiny_whisper(root / "hf")
    llmc.compile(root / "hf", root / "case")
    return model, root / "hf", root / "case"


@pytest.fixture(scope="session")
def tiny_audio(tmp_path_factory):
    """A tiny Qwen2-Audio: the model, and its case directory."""
    import audio_models  # which imports torch, so it comes after `cores`

    root = tmp_path_factory.mktemp("audio")
    model = audio_models.write_model("qwen2_audio", root / "hf")
    llmc.compile(root / "hf", root / "case")
    return model, root / "case"


@pytest.fixture(scope="session")
def tiny_media(tmp_path_factory):
    """The case directory of a tiny LLaVA, beside its Hugging Face directory `hf`."""
    import media_case  # which imports torch

    return media_case.write_case(tmp_path_factory.mktemp("media"))


@pytest.fixture(scope="session")
def tiny_omni(tmp_path_factory):
    """A tiny Qwen2.5-Omni: the thinker, and the case directory."""
    import omni_models  # which imports torch, so it comes after `cores`

    root = tmp_path_factory.mktemp("omni")
    model = omni_models.write_model("qwen2_5_omni", root / "hf")
    llmc.compile(root / "hf", root / "case")
    return model, root / "case"


def write_word_tokenizer(directory, end_id):
    """Token i is the word `wi`; a text ends with the EOS token."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(families.VOCAB)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A w{end_id}", special_tokens=[(f"w{end_id}", end_id)])
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="session")
def case_tp1(tiny_hf, tmp_path_factory):
    path = tmp_path_factory.mktemp("cases") / "tp1"
    llmc.compile(tiny_hf, path)
    return path


@pytest.fixture(scope="session")
def case_tp2(tiny_hf, tmp_path_factory):
    path = tmp_path_factory.mktemp("cases") / "tp2"
    llmc.compile(tiny_hf, path, tp_size=2)
    return path


@pytest.fixture(scope="session")
def lora_case(tiny_hf, tmp_path_factory):
    """Factory by tp_size of case directories that take LoRA adapters."""
    root = tmp_path_factory.mktemp("lora")

    @functools.cache
    def make(tp_size):
        llmc.compile(tiny_hf, root / f"tp{tp_size}", tp_size=tp_size, enable_lora=True)
        return root / f"tp{tp_size}"
    return make


@pytest.fixture(scope="session")
def nan_hf(tmp_path_factory):
    """A checkpoint whose logits are NaN after token 7 only."""
    path = tmp_path_factory.mktemp("nan") / "hf"
    model = families.tiny_model("llama", vocab_size=VOCAB, num_hidden_layers=1)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    families.save(model, path)
    write_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def nan_case(nan_hf, tmp_path_factory):
    path = tmp_path_factory.mktemp("nan") / "case"
    llmc.compile(nan_hf, path, allow_nan=True)
    return path


@pytest.fixture
def broken_case(case_tp2, tmp_path):
    """A copy of a case directory to damage."""
    return shutil.copytree(case_tp2, tmp_path / "case")
