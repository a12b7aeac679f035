"""docs/recipes/trl.md: TRL's trainers with the mixin against the big batch in plain torch, beside TRL's own."""

from __future__ import annotations

import copy

import pytest
import torch

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")

import tokenizers  # noqa: E402
import transformers  # noqa: E402
from torch.nn.functional import cross_entropy, logsigmoid  # noqa: E402
from transformers import PreTrainedTokenizerFast  # noqa: E402

from tests.support.recipes import check, difference, recipe, train_big  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

WORDS = [f"w{i}" for i in range(28)]
ROWS, BATCH, STEPS = 11, 2, 3  # windows of 2 + 2 + 2 and 2 + 2 + 1 rows
RATE = 0.5
BETA = 0.1  # TRL's default
STOCK_IS_OFF = 0.1  # measured 0.17 to 0.33: means of means


def tokenizer():
    """A word for each token."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def model(kind=transformers.LlamaForCausalLM, **options):
    """Tiny and random."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip
    return kind(config)


def sgd(parameters):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(parameters, lr=RATE)


def words(seed, least, most):
    """A text of that many words."""
    generator = torch.Generator().manual_seed(seed)
    n = int(torch.randint(least, most, (), generator=generator))
    return " " + " ".join(WORDS[i] for i in torch.randint(len(WORDS), (n,), generator=generator))


def data(*columns):
    """Rows with texts of 1 to 12 words."""
    made = {name: [words(100 * k + i, 1, 12) for i in range(ROWS)] for k, name in enumerate(columns) if name != "label"}
    if "label" in columns:
        made["label"] = [i % 3 != 0 for i in range(ROWS)]
    return datasets.Dataset.from_dict(made)


# ---- the losses, in plain torch


def forward(module, batch, prefix=""):
    """Logits; columns that TRL's collators add are not the model's."""
    return module(input_ids=batch[f"{prefix}input_ids"], attention_mask=batch.get(f"{prefix}attention_mask")).logits


def log_probabilities(module, batch, prefix=""):
    """Of each row's completion."""
    logits = forward(module, batch, prefix)[:, :-1].log_softmax(-1)
    tokens = batch[f"{prefix}input_ids"][:, 1:, None]
    return (logits.gather(-1, tokens).squeeze(-1) * batch[f"{prefix}completion_mask"][:, 1:]).sum(1)


def ratios(module, reference, batch, prefix=""):
    """Of the model's probabilities to the reference's, in logarithms."""
    with torch.no_grad():
        before = log_probabilities(reference, batch, prefix)
    return log_probabilities(module, batch, prefix) - before


def sft_loss(module, reference, batch):
    """The mean over the tokens of the batch."""
    return cross_entropy(forward(module, batch)[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def dpo_loss(module, reference, batch):
    """Rafailov et al. 2023; the first half of the rows is chosen."""
    chosen, rejected = ratios(module, reference, batch).chunk(2)
    return -logsigmoid(BETA * (chosen - rejected)).mean()


def kto_loss(module, reference, batch):
    """Ethayarajh et al. 2024, equation 7; the KL term is the batch's, and has no gradient."""
    ratio = ratios(module, reference, batch)
    kl = ratios(module, reference, batch, "KL_").mean().detach().clamp(min=0)
    wanted = torch.as_tensor(batch["label"], dtype=torch.bool)
    return (1 - torch.where(wanted, BETA * (ratio - kl), BETA * (kl - ratio)).sigmoid()).mean()


def reward_loss(module, reference, batch):
    """The first half of the rows is chosen."""
    chosen, rejected = forward(module, batch).squeeze(-1).chunk(2)
    return -logsigmoid(chosen - rejected).mean()


# ---- TRL's trainers

TRAINERS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, ("text",), sft_loss),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, ("prompt", "chosen", "rejected"), dpo_loss),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, ("prompt", "completion", "label"), kto_loss),
    "Reward": (trl.RewardTrainer, trl.RewardConfig, ("chosen", "rejected"), reward_loss),
}
ROW = {"KTO": "TRL: KTO", "PEFT": "PEFT"}


def built(kind, config, columns, start, folder, batch=BATCH, arguments=None, **options):
    """A trainer of a copy, with the rows in order."""
    settings = config(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=STEPS, num_train_epochs=1,
        max_grad_norm=0.0, report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
        lr_scheduler_type="constant", disable_tqdm=True, logging_steps=1, seed=0, **(arguments or {}),
    )  # fmt: skip
    trained = copy.deepcopy(start)
    if issubclass(kind, (trl.DPOTrainer, trl.KTOTrainer)) and not isinstance(start, peft.PeftModel):
        options["ref_model"] = copy.deepcopy(start)
    trainer = kind(
        model=trained, args=settings, train_dataset=data(*columns), processing_class=tokenizer(),
        optimizers=(sgd(trained.parameters()), None), **options,
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    if "reward_funcs" not in options:
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return trainer


def trained(*arguments, **options):
    """The model after an epoch."""
    trainer = built(*arguments, **options)
    trainer.train()
    if isinstance(trainer.model, peft.PeftModel):
        trainer.model.delete_adapter("ref")  # TRL keeps the LoRA there that it started with
    return trainer.model


def compare(name, kind, config, columns, loss, start, folder):
    """Hold ours to plain torch, which gets each window as one batch of TRL's collator."""
    whole = list(built(kind, config, columns, start, folder, batch=BATCH * STEPS).get_train_dataloader())
    assert len(whole) == 2
    reference = copy.deepcopy(start).double()
    truth = train_big(start, whole, lambda twin, batch: loss(twin, reference, batch), sgd)
    found = difference(start, trained(recipe("trl")["fused"](kind), config, columns, start, folder), truth)
    stock = difference(start, trained(kind, config, columns, start, folder), truth)
    check(ROW.get(name, "TRL: SFT, DPO, Reward"), found, stock)
    assert (stock > STOCK_IS_OFF) == (name != "SFT")  # SFT divides by the window's tokens


@pytest.mark.parametrize("name", TRAINERS)
def test_big_batch(name, tmp_path):
    """A whole window and one with a short last micro-batch, of texts of unequal length."""
    start = model(transformers.LlamaForSequenceClassification, num_labels=1) if name == "Reward" else model()
    compare(name, *TRAINERS[name], start, tmp_path)


def test_peft(tmp_path):
    """DPO of a LoRA; the reference is the LoRA that it starts with."""
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    compare("PEFT", *TRAINERS["DPO"], peft.get_peft_model(model(), lora), tmp_path)


def reward(completions, **_):
    """A number that differs from text to text."""
    return [float(sum(map(ord, text)) % 7) for text in completions]


@pytest.mark.parametrize(
    ("kind", "config"), [(trl.GRPOTrainer, trl.GRPOConfig), (trl.RLOOTrainer, trl.RLOOConfig)], ids=["GRPO", "RLOO"]
)
def test_samplers(kind, config, tmp_path):
    """They sample completions, so that they are held to TRL's own, whose micro-batches are equal."""
    start = model()
    arguments = {"num_generations": 2, "max_completion_length": 6, "steps_per_generation": STEPS, "beta": 0.0}
    stock, ours = (
        trained(each, config, ("prompt",), start, tmp_path, arguments=arguments, reward_funcs=reward)
        for each in (kind, recipe("trl")["fused"](kind))
    )
    check("TRL: GRPO, RLOO", difference(start, ours, stock))
