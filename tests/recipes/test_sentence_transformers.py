"""docs/recipes/sentence_transformers.md: its Trainers against plain torch's big batch, in float64, beside stock's."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # models are random, nothing is to be looked up

import pytest
import torch

pytest.importorskip("sentence_transformers")

import transformers  # noqa: E402
from datasets import Dataset  # noqa: E402
from sentence_transformers import (  # noqa: E402
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer import losses, modules  # noqa: E402

from tests.support.doc_blocks import ROOT, blocks  # noqa: E402
from tests.support.models import relative_error  # noqa: E402

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),
]

ROUNDING = 1e-5  # fp32 against fp64, of the movement; measured 2e-6
STOCK_IS_OFF = 0.05  # measured 0.09 for the mean of means, 0.2 to 0.3 for losses that couple samples
WORDS = [f"w{index}" for index in range(60)]
SIZE, STEPS = 4, 3
N = 18  # micro-batches of 4, 4, 4, and of 4 and 2: a short window that is not equal either
LR = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved BERT with its tokenizer, without dropout."""
    path = tmp_path_factory.mktemp("bert")
    (path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]))
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 5,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    transformers.BertModel(config).save_pretrained(path)
    tokenizer = transformers.BertTokenizerFast(vocab=str(path / "vocab.txt"))
    assert tokenizer("w0 w59")["input_ids"] == [2, 5, 64, 3]  # not [UNK], which would make all words one
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """What the page defines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        namespace = {"__name__": "__docs__"}
        for block in blocks(ROOT / "docs/recipes/sentence_transformers.md"):
            if block.runs:
                block.run(namespace)
        return namespace


def build(folder):
    """The model as it begins."""
    return SentenceTransformer(modules=[modules.Transformer(str(folder)), modules.Pooling(16)], device="cpu")


def sentences(seed):
    """Of 2 to 7 words."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 8, (N,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(60, (n,), generator=generator).tolist()) for n in lengths]


PAIRS = {"anchor": sentences(1), "positive": sentences(2)}
SCORED = {**PAIRS, "score": torch.rand(N, generator=torch.Generator().manual_seed(3)).tolist()}


def way(folder, model):
    """By how much the parameters have moved."""
    return [p.detach() - q.detach() for p, q in zip(model.parameters(), build(folder).parameters(), strict=True)]


def train(folder, tmp_path, cls, loss, data, size=SIZE, steps=STEPS):
    """One epoch in order, with SGD; the movement and the logged losses."""

    class InOrder(cls):
        def get_batch_sampler(self, dataset, batch_size, drop_last, *_, **__):
            sampler = torch.utils.data.SequentialSampler(dataset)
            return torch.utils.data.BatchSampler(sampler, batch_size, drop_last)

    model = build(folder)
    args = SentenceTransformerTrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=size,
        gradient_accumulation_steps=steps,
        num_train_epochs=1,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = InOrder(
        model=model,
        args=args,
        train_dataset=Dataset.from_dict(data),
        loss=loss(model),
        optimizers=(torch.optim.SGD(model.parameters(), lr=LR), None),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return way(folder, model), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def truth(folder, loss, data):
    """The same by plain torch with big batches, in float64."""
    model = build(folder).double()
    loss_fn, optimizer, values = loss(model), torch.optim.SGD(model.parameters(), lr=LR), []
    for start in range(0, N, SIZE * STEPS):
        window = {name: column[start : start + SIZE * STEPS] for name, column in data.items()}
        labels = torch.tensor(window.pop("score"), dtype=torch.float64) if "score" in window else None
        value = loss_fn([model.preprocess(column) for column in window.values()], labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(value.item())
    return way(folder, model), values


def test_losses_of_each_sample(folder, tmp_path, page):
    """Micro-batches count by their rows; in stock, a short one counts as much as a whole one."""
    moved, values = truth(folder, losses.CosineSimilarityLoss, SCORED)
    ours, logged = train(folder, tmp_path, page["Trainer"], losses.CosineSimilarityLoss, SCORED)
    assert relative_error(ours, moved) < ROUNDING
    assert logged == pytest.approx(values, rel=ROUNDING)
    stock, _ = train(folder, tmp_path, SentenceTransformerTrainer, losses.CosineSimilarityLoss, SCORED)
    assert relative_error(stock, moved) > STOCK_IS_OFF


COUPLED = [
    (losses.MultipleNegativesRankingLoss, PAIRS, "CoupledTrainer"),
    (losses.MultipleNegativesSymmetricRankingLoss, PAIRS, "CoupledTrainer"),
    (losses.CoSENTLoss, SCORED, "LabelledTrainer"),
]


@pytest.mark.parametrize(("loss", "data", "trainer"), COUPLED, ids=lambda value: getattr(value, "__name__", ""))
def test_coupled_losses(folder, tmp_path, page, loss, data, trainer):
    """A window is one batch, and its loss is logged once; in stock a sample meets those of its micro-batch."""
    moved, values = truth(folder, loss, data)
    ours, logged = train(folder, tmp_path, page[trainer], loss, data)
    assert relative_error(ours, moved) < ROUNDING
    assert logged == pytest.approx(values, rel=ROUNDING)
    stock, _ = train(folder, tmp_path, SentenceTransformerTrainer, loss, data)
    assert relative_error(stock, moved) > STOCK_IS_OFF


def test_the_cached_loss(folder, tmp_path, page):
    """The peer, which chunks one batch itself: right in stock, and inside the mixin."""
    moved, _ = truth(folder, losses.MultipleNegativesRankingLoss, PAIRS)
    for cls in (SentenceTransformerTrainer, page["Trainer"]):
        cached = lambda model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=SIZE)  # noqa: E731
        found, _ = train(folder, tmp_path, cls, cached, PAIRS, size=SIZE * STEPS, steps=1)
        assert relative_error(found, moved) < ROUNDING


def test_a_loss_with_parameters(folder, tmp_path, page):
    """An error, until they are put into the model."""
    labelled = {**PAIRS, "label": [index % 3 for index in range(N)]}

    def softmax(model):
        torch.manual_seed(1)
        return losses.SoftmaxLoss(model, sentence_embedding_dimension=16, num_labels=3)

    def train_softmax(cls, size, steps, move=False):
        model = build(folder)
        loss = softmax(model)
        if move:
            model[0].head = loss.classifier
        args = SentenceTransformerTrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            max_steps=1,
            max_grad_norm=0.0,
            learning_rate=LR,
            optim="sgd",
            lr_scheduler_type="constant",
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=7,
        )
        cls(model=model, args=args, train_dataset=Dataset.from_dict(labelled), loss=loss).train()
        begin = [*build(folder).parameters(), *softmax(build(folder)).classifier.parameters()]
        end = [*(p for n, p in model.named_parameters() if "head" not in n), *loss.classifier.parameters()]
        return [p.detach() - q.detach() for p, q in zip(end, begin, strict=True)]

    with pytest.raises(RuntimeError, match="an optimizer owns a parameter of shape"):
        train_softmax(page["Trainer"], SIZE, STEPS)
    whole = train_softmax(SentenceTransformerTrainer, SIZE * STEPS, 1)
    assert relative_error(train_softmax(page["Trainer"], SIZE, STEPS, move=True), whole) < ROUNDING
