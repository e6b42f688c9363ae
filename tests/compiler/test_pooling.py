"""Embedding models and classifiers: rows equal transformers', alone and in company."""

import json
import shutil
from pathlib import Path

import numpy as np
import pooling
import pytest
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

import llmc
from llmc.artifacts.manifest import read_manifest
from llmc.runtime.core.pooling import Input

LENGTHS = (5, 1, 17, 40, 9)
# Families whose structure another one has too are for `make test-all`.
SELECTED = ("bert", "roberta", "distilbert", "mpnet", "modernbert", "nomic_bert", "qwen3",
            "mistral", "gemma3_text")
FAMILIES = [pytest.param(name, marks=[] if name in SELECTED else [pytest.mark.thorough])
            for name in (*pooling.ENCODERS, *pooling.DECODERS) if name not in pooling.REFUSED]
CLASSIFIERS = [pytest.param(name, task, marks=[] if (name, task) in {
    ("bert", "classify"), ("roberta", "token_classify"), ("modernbert", "classify"),
    ("qwen3", "classify")} else [pytest.mark.thorough])
    for name, tasks in pooling.CLASSIFIERS.items() for task in tasks]


def texts():
    return pooling.texts(LENGTHS)


def check(case, model, kind, tolerance=1e-5, types=()):
    """Rows of all texts together, and of each alone, equal transformers'."""
    types = types or [()] * len(LENGTHS)
    inputs = [Input(ids, own) for ids, own in zip(texts(), types, strict=True)]
    expected = [pooling.reference(model, own.token_ids, kind, own.token_type_ids)
                for own in inputs]
    with llmc.LLM(case) as llm:
        together = llm.pool(inputs)
        alone = [llm.pool([own])[0] for own in inputs]
    for rows in (together, alone):
        pooling.assert_rows(rows, expected, tolerance)


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_equal_transformers(name, tmp_path):
    fields = {**pooling.ENCODERS, **pooling.DECODERS}[name]
    kind = "last" if name in pooling.DECODERS else "mean"
    model = pooling.save(name, fields, tmp_path / "hf", pooling=kind)
    info = llmc.compile(tmp_path / "hf", tmp_path / "case").pooling
    assert (info.task, info.kind, info.width) == ("embed", kind, model.config.hidden_size)
    check(tmp_path / "case", model, kind)


@pytest.mark.parametrize(("name", "task"), CLASSIFIERS)
def test_logits_of_classifiers_equal_transformers(name, task, tmp_path):
    fields = {**pooling.ENCODERS, **pooling.DECODERS}[name]
    model = pooling.save(name, fields, tmp_path / "hf", task, num_labels=3)
    info = llmc.compile(tmp_path / "hf", tmp_path / "case").pooling
    assert (info.task, info.width, info.activation) == (task, 3, "softmax")
    assert info.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    check(tmp_path / "case", model, "")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """A BERT embedding model's directory, and the model."""
    root = tmp_path_factory.mktemp("bert")
    return root, pooling.save("bert", pooling.ENCODERS["bert"], root, pooling="mean")


@pytest.mark.parametrize("tp_size", [1, 3])
def test_pairs_of_texts_have_token_types(tp_size, tmp_path):
    model = pooling.save("bert", pooling.ENCODERS["bert"], tmp_path / "hf", "classify",
                         num_labels=1)
    info = llmc.compile(tmp_path / "hf", tmp_path / "case", tp_size=tp_size).pooling
    assert info.activation == "sigmoid"
    halves = [[0] * (n // 2) + [1] * (n - n // 2) for n in LENGTHS]
    check(tmp_path / "case", model, "", types=halves)


@pytest.mark.parametrize(("kind", "options"), [
    ("cls", {}), ("last", {}), ("mean", {"tp_size": 2})])
def test_pooling_may_be_chosen_and_divided(bert, kind, options, tmp_path):
    root, model = bert
    manifest = llmc.compile(root, tmp_path / "case", pooling=kind, **options)
    assert manifest.pooling.kind == kind
    check(tmp_path / "case", model, kind)


def test_quantized_weights_keep_the_direction_of_vectors(bert, tmp_path):
    root, model = bert
    manifest = llmc.compile(root, tmp_path / "case", quantize="int8")
    assert manifest.quantization == ("int8",)
    with llmc.LLM(tmp_path / "case") as llm:
        rows = llm.pool([Input(ids) for ids in texts()])
    for ids, row in zip(texts(), rows, strict=True):
        truth = pooling.reference(model, ids, "mean")
        assert row @ truth > 0.999 * np.linalg.norm(row) * np.linalg.norm(truth)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_int8_activations_keep_the_direction_of_vectors(bert, tp_size, tmp_path):
    root, model = bert
    manifest = llmc.compile(root, tmp_path / "case", quantize="int8", quantize_activations=True,
                            tp_size=tp_size)
    forms = manifest.chips[0].quantization.values()
    assert {(form.dtype, form.activation_dtype) for form in forms} == {("int8", "int8")}
    assert all(form.group_size in (64, 100, 64 // tp_size, 100 // tp_size) for form in forms)
    with llmc.LLM(tmp_path / "case") as llm:
        rows = llm.pool([Input(ids) for ids in texts()])
    for ids, row in zip(texts(), rows, strict=True):
        truth = pooling.reference(model, ids, "mean")
        assert row @ truth > 0.995 * np.linalg.norm(row) * np.linalg.norm(truth)


@pytest.mark.parametrize(("options", "message"), [
    (dict(group_size=32), "group_size is given, but int8 weights with quantize_activations"),
    (dict(target="cuda"), "target 'cuda' has no kernels for int8 activations"),
    (dict(quantize="int4"), "without quantize fp8 or int8")])
def test_int8_activations_are_refused_where_no_kernel_has_them(bert, options, message, tmp_path):
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile(bert[0], tmp_path / "case",
                     **{"quantize": "int8", "quantize_activations": True, **options})


def test_modules_of_sentence_transformers_are_applied_in_order(bert, tmp_path):
    root, model = bert
    shutil.copytree(root, tmp_path / "hf")
    pooling.write_modules(tmp_path / "hf", "mean", 64, "Dense", "Normalize")
    linear = torch.nn.Linear(64, 24)
    (tmp_path / "hf" / "2_Dense").mkdir()
    save_file({f"linear.{name}": own.detach() for name, own in linear.named_parameters()},
              tmp_path / "hf" / "2_Dense" / "model.safetensors")
    (tmp_path / "hf" / "2_Dense" / "config.json").write_text(json.dumps({
        "in_features": 64, "out_features": 24, "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh"}))
    info = llmc.compile(tmp_path / "hf", tmp_path / "case").pooling
    assert (info.width, info.normalized) == (24, True)
    with llmc.LLM(tmp_path / "case") as llm:
        rows = llm.pool([Input(ids) for ids in texts()])
    for ids, row in zip(texts(), rows, strict=True):
        hidden = torch.tensor(pooling.reference(model, ids, "mean"))
        truth = torch.tanh(linear.double()(hidden)).detach().numpy()
        assert np.abs(row - truth / np.linalg.norm(truth)).max() < 1e-5


def test_the_transformer_may_be_in_a_folder_of_its_own(bert, tmp_path):
    root, model = bert
    shutil.copytree(root, tmp_path / "hf" / "0_Transformer")
    shutil.move(tmp_path / "hf" / "0_Transformer" / "1_Pooling", tmp_path / "hf")
    (tmp_path / "hf" / "0_Transformer" / "modules.json").unlink()
    pooling.write_modules(tmp_path / "hf", "mean", 64)
    listed = json.loads((tmp_path / "hf" / "modules.json").read_text())
    listed[0]["path"] = "0_Transformer"
    (tmp_path / "hf" / "modules.json").write_text(json.dumps(listed))
    llmc.compile(tmp_path / "hf", tmp_path / "case")
    check(tmp_path / "case", model, "mean")


def test_the_length_is_that_of_sentence_transformers_unless_given(bert, tmp_path):
    root, _ = bert
    shutil.copytree(root, tmp_path / "hf")
    (tmp_path / "hf" / "sentence_bert_config.json").write_text(json.dumps(
        {"max_seq_length": 20, "do_lower_case": False}))
    assert llmc.compile(tmp_path / "hf", tmp_path / "case").dims.max_seq_len == 20
    manifest = llmc.compile(tmp_path / "hf", tmp_path / "case", max_seq_len=60)
    assert manifest.dims.max_seq_len == 60


def test_positions_reserved_for_padding_are_no_tokens(tmp_path):
    pooling.save("roberta", pooling.ENCODERS["roberta"], tmp_path / "hf", pooling="cls")
    manifest = llmc.compile(tmp_path / "hf", tmp_path / "case")
    assert manifest.dims.max_seq_len == 64  # of 66 rows, padding_idx 1


def test_a_head_for_pretraining_is_left_out(tmp_path):
    from transformers import BertConfig, BertForMaskedLM
    model = BertForMaskedLM(BertConfig(**pooling.ENCODERS["bert"])).eval()
    model.save_pretrained(tmp_path / "hf")
    llmc.compile(tmp_path / "hf", tmp_path / "case", task="embed", pooling="cls")
    check(tmp_path / "case", model.bert, "cls")


def test_a_chat_model_may_embed(tmp_path, tiny_hf, tiny_model):
    manifest = llmc.compile(tiny_hf, tmp_path / "case", task="embed", pooling="last")
    assert manifest.pooling.kind == "last" and manifest.chips[0].cache
    ids = [5, 9, 40, 2, 17]
    with llmc.LLM(tmp_path / "case") as llm:
        row = llm.embed([ids])[0]
    assert np.abs(row - pooling.reference(tiny_model.model, ids, "last")).max() < 1e-4


def test_compiling_twice_gives_equal_bytes(bert, tmp_path):
    for name in ("one", "two"):
        llmc.compile(bert[0], tmp_path / name)
    first, second = (read_manifest(tmp_path / name) for name in ("one", "two"))
    assert first == second


def edited(bert, tmp_path, name, **fields):
    """A copy of the BERT directory with another file in JSON."""
    shutil.copytree(bert[0], tmp_path / "hf")
    path = tmp_path / "hf" / name
    known = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**known, **fields} if isinstance(known, dict) else fields["all"]))
    return tmp_path / "hf"


def transformer_and(*more):
    return {"all": [{"type": f"sentence_transformers.models.{name}", "path": ""}
                    for name in ("Transformer", *more)]}


@pytest.mark.parametrize(("file", "fields", "options", "message"), [
    ("config.json", {}, {"task": "classify"}, "'BertModel', which has no head for it"),
    ("config.json", {}, {"task": "generate", "pooling": "cls"}, "with task generate"),
    ("config.json", {}, {"task": "rank"}, "task 'rank' is unknown"),
    ("config.json", {}, {"pooling": "max"}, "pooling 'max' is unknown; use one of: cls, mean"),
    ("config.json", {}, {"draft": "mtp"}, "draft is given, but 'BertModel' is compiled for task"),
    ("config.json", {}, {"max_seq_len": 100}, "max_seq_len 100 is not supported"),
    ("modules.json", transformer_and("Pooling", "LSTM"), {}, "module 'LSTM', which llmc does not"),
    ("modules.json", transformer_and("CNN"), {}, "lists Transformer, CNN; llmc supports"),
    ("modules.json", {"all": [{"type": "x.Transformer", "path": "../x"}]}, {}, "outside of"),
    ("modules.json", {"all": [3]}, {}, "is not a list of modules"),
    ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, {}, "give --pooling to choose"),
    ("1_Pooling/config.json", {"pooling_mode": "weightedmean"}, {}, "'weightedmean'; llmc"),
    ("1_Pooling/config.json", {"include_prompt": False}, {}, "excludes prompts from pooling"),
    ("sentence_bert_config.json", {"do_lower_case": True}, {}, "do_lower_case true"),
    ("config_sentence_transformers.json", {"prompts": {"a": 3}}, {}, "expected texts by name"),
    ("config_sentence_transformers.json", {"default_prompt_name": "q"}, {}, "one of these names"),
])
def test_bad_input_is_refused_with_a_reason(bert, file, fields, options, message, tmp_path):
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile(edited(bert, tmp_path, file, **fields), tmp_path / "case", **options)
    assert not (tmp_path / "case").exists()


def test_a_target_that_returns_no_rows_is_refused(bert, monkeypatch, tmp_path):
    monkeypatch.setattr("llmc.compiler.targets.tensorrt_rtx.describe", lambda options: None)
    with pytest.raises(llmc.LlmcError, match="task embed is not supported by target 'tensorrt_rtx"):
        llmc.compile(bert[0], tmp_path / "case", target="tensorrt_rtx")


def test_a_model_without_a_named_pooling_asks_for_one(bert, tmp_path):
    shutil.copytree(bert[0], tmp_path / "hf")
    (tmp_path / "hf" / "modules.json").unlink()
    with pytest.raises(llmc.LlmcError, match="names no pooling .*--pooling cls, mean or last"):
        llmc.compile(tmp_path / "hf", tmp_path / "case", task="embed")
    with pytest.raises(llmc.LlmcError, match="bidirectional attention .*--task embed --pooling"):
        llmc.compile(tmp_path / "hf", tmp_path / "case")


def test_deberta_is_refused_by_its_attention(tmp_path):
    pooling.save("deberta-v2", pooling.ENCODERS["deberta-v2"], tmp_path / "hf", pooling="cls")
    with pytest.raises(llmc.LlmcError, match="attention was not recognized: the scores are comb"):
        llmc.compile(tmp_path / "hf", tmp_path / "case")


def test_an_encoder_decoder_is_refused(tmp_path):
    from transformers import BartConfig, BartForSequenceClassification
    BartForSequenceClassification(BartConfig(
        vocab_size=101, d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=32,
        decoder_ffn_dim=32, encoder_attention_heads=2, decoder_attention_heads=2,
        max_position_embeddings=64)).save_pretrained(tmp_path / "hf")
    with pytest.raises(llmc.LlmcError, match="encoder-decoder model, which task classify"):
        llmc.compile(tmp_path / "hf", tmp_path / "case")


QWEN3_TEMPLATE = (
    "the query {{ (messages | selectattr('role', 'eq', 'query') | first).content }} "
    "document {{ (messages | selectattr('role', 'eq', 'document') | first).content }} is")


@pytest.mark.parametrize("tied", [True, False])
def test_a_reranker_may_compare_two_logits_of_the_last_token(tied, tmp_path):
    config = CONFIG_MAPPING["qwen3"](**pooling.DECODERS["qwen3"], tie_word_embeddings=tied)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "hf")
    pooling.write_tokenizer(tmp_path / "hf")
    (tmp_path / "hf" / "chat_template.jinja").write_text(QWEN3_TEMPLATE)
    pooling.write_modules(tmp_path / "hf", "last", 64)
    (tmp_path / "hf" / "modules.json").write_text(json.dumps([
        {"type": "sentence_transformers.base.modules.Transformer", "path": ""},
        {"type": "sentence_transformers.cross_encoder.modules.LogitScore", "path": "1_Pooling"}]))
    (tmp_path / "hf" / "1_Pooling" / "config.json").write_text(json.dumps(
        {"true_token_id": 40, "false_token_id": 41}))
    info = llmc.compile(tmp_path / "hf", tmp_path / "case").pooling
    assert (info.task, info.kind, info.activation) == ("classify", "last", "sigmoid")
    with llmc.LLM(tmp_path / "case") as llm:
        scores = llm.score("about food", ["the cat runs", "cold water"])
        for text, score in zip(["the cat runs", "cold water"], scores, strict=True):
            ids = llm.tokenize(f"the query about food document {text} is", False)
            logits = torch.tensor(pooling.reference(model, ids))[-1]
            assert abs(score - float(torch.sigmoid(logits[40] - logits[41]))) < 1e-5


RERANKER = Path(__file__).parents[2] / "examples" / "qwen3_reranker.jinja"
PREFIX = ('<|im_start|>system\nJudge whether the Document meets the requirements based on the '
          'Query and the Instruct provided. Note that the answer can only be "yes" or "no".'
          '<|im_end|>\n<|im_start|>user\n')
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture(scope="module")
def causal_lm(tmp_path_factory):
    """A Qwen 3 as Qwen3-Reranker's directories have it: without modules.json, with tied weights."""
    root = tmp_path_factory.mktemp("reranker")
    config = CONFIG_MAPPING["qwen3"](**{**pooling.DECODERS["qwen3"],
                                        "max_position_embeddings": 512}, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(root)
    pooling.write_tokenizer(root)
    (root / "chat_template.jinja").write_text(
        "{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}")
    return root, model


@pytest.mark.parametrize("tokens", ["not,is", "is"])
def test_a_causal_lm_scores_by_the_tokens_that_are_given(causal_lm, tokens, tmp_path):
    root, model = causal_lm
    info = llmc.compile(root, tmp_path / "case", task="classify", classifier_from_token=tokens,
                        score_template=RERANKER, tp_size=2).pooling
    assert (info.kind, info.activation, info.pair_template) == ("last", "sigmoid", True)
    tokenizer = AutoTokenizer.from_pretrained(root)
    documents = ["the cat runs", "cold water is not food"]
    with llmc.LLM(tmp_path / "case") as llm:
        scores = llm.score("about food", documents)
    for document, score in zip(documents, scores, strict=True):
        parts = (PREFIX, f"<Instruct>: {INSTRUCTION}\n<Query>: about food\n<Document>: {document}",
                 SUFFIX)
        ids = [token for part in parts
               for token in tokenizer.encode(part, add_special_tokens=False)]
        logits = torch.tensor(pooling.reference(model, ids))[-1]
        true, false = (float(logits[tokenizer.convert_tokens_to_ids(word)])
                       for word in ("is", "not"))
        assert abs(score - float(torch.sigmoid(torch.tensor(
            true - (false if "," in tokens else 0.0))))) < 1e-5


def test_a_classifier_of_pairs_may_have_a_template(tmp_path):
    model = pooling.save("qwen3", pooling.DECODERS["qwen3"], tmp_path / "hf", "classify",
                         num_labels=1)
    (tmp_path / "pair.jinja").write_text(QWEN3_TEMPLATE)
    llmc.compile(tmp_path / "hf", tmp_path / "case", score_template=tmp_path / "pair.jinja")
    with llmc.LLM(tmp_path / "case") as llm:
        score, = llm.score("about food", ["the cat runs"])
        ids = llm.tokenize("the query about food document the cat runs is", False)
    logit = pooling.reference(model, ids)[0]
    assert abs(score - float(torch.sigmoid(torch.tensor(logit)))) < 1e-5


@pytest.mark.parametrize(("options", "message"), [
    (dict(task="classify"), "no head for it; .*--classifier_from_token no,yes if it answers by"),
    (dict(classifier_from_token="no,yes"), "names 'no', which is no token of the"),
    (dict(classifier_from_token="a,the,is"), "expected one token, or two"),
    (dict(classifier_from_token=","), "expected one token, or two"),
    (dict(classifier_from_token="is", task="embed"), "is given with task embed"),
    (dict(classifier_from_token="is", pooling="cls"), "pooling 'cls' is given, but"),
    (dict(classifier_from_token="is"), "does not write the query and the document; give --score_t"),
    (dict(classifier_from_token="is", score_template="none.jinja"), "'none.jinja' cannot be read"),
    (dict(score_template=RERANKER), "is compiled for task generate; give --task classify"),
])
def test_tokens_and_templates_that_do_not_fit_are_refused(causal_lm, options, message, tmp_path):
    with pytest.raises(llmc.LlmcError, match=message):
        llmc.compile(causal_lm[0], tmp_path / "case", **options)


def test_an_encoder_has_no_logits_of_tokens(bert, tmp_path):
    with pytest.raises(llmc.LlmcError, match="'BertModel' has no linear LM head"):
        llmc.compile(bert[0], tmp_path / "case", classifier_from_token="is")
