"""transformers' Trainer and ours: equal where its normalization is right, right where it is a mean of means."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.backends import same_bits
from tests.support.models import relative_error
from tests.support.trainers import VOCABULARY, Samples, gpt2

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accumkernels as ak  # noqa: E402
from accumkernels.integrations.transformers import FusedAccumulationMixin, Trainer  # noqa: E402

pytestmark = [pytest.mark.integrations, pytest.mark.usefixtures("one_thread")]

STOCK = transformers.Trainer
CLIPPED = {"rtol": 1e-5, "atol": 1e-7}  # norms are summed in another order
ROUNDING = 3e-6  # gradients in fp32 against fp64, through the model; measured 6e-7


class Plain(nn.Module):
    """A model of one's own: the mean over its labels, and no `num_items_in_batch`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids, labels):
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())}


def sgd(model):
    """Moves parameters by the gradient itself."""
    return torch.optim.SGD(model.parameters(), lr=1.0)


def build(cls, folder, samples, model=None, optimizer=None, options=None, scaler=False, **arguments):
    """A Trainer: 2 samples to a micro-batch, 4 micro-batches to a window."""
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **arguments,
    }
    model = gpt2() if model is None else model
    trainer = cls(
        model=model,
        args=transformers.TrainingArguments(str(folder), **settings),
        train_dataset=Samples(samples),
        optimizers=(None, None) if optimizer is None else (optimizer(model), None),
        **({} if options is None else {"accumulator_options": options}),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    if scaler:  # fp16, which transformers has on GPUs only
        trainer.accelerator.native_amp = True
        trainer.accelerator.state._mixed_precision = "fp16"
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    return trainer


def train(*arguments, **keywords):
    """Build, train; the Trainer."""
    trainer = build(*arguments, **keywords)
    trainer.train()
    return trainer


def bits_agree(one, two):
    """Of all parameters."""
    return all(same_bits(a, b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


def logged(trainer, key):
    """Per window."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def in_order(trainer):
    """Without shuffling, to know which samples are in which window."""
    trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(trainer.train_dataset)
    return trainer


def moved(before, trainer):
    """The gradient of the one window of SGD with rate 1, constant."""
    return [p - q for p, q in zip(before.parameters(), trainer.model.parameters(), strict=True)]


def truth(model, samples):
    """Gradients of the mean over all labels of the window, in fp64."""
    twin = copy.deepcopy(model).double()
    batch = Samples(samples).all()
    out = twin(**batch)
    out["loss"].backward()
    return [p.grad for p in twin.parameters()]


@pytest.mark.parametrize("options", [None, {"release": "backward"}], ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_same_bits_as_the_trainer(tmp_path, precision, options):
    """Two epochs of 10 micro-batches, tokens counted by `num_items_in_batch`, the last window of each half full.

    Normalization by tokens is right in the Trainer since https://github.com/huggingface/transformers/pull/34191, for
    models that take `num_items_in_batch`; ours divides by the same number. In buckets the two 16-bit parts of the tied
    embedding are added to the sum in turn, where the Trainer adds them to each other first.
    """
    arguments = {"num_train_epochs": 2, "bf16": precision == "bf16", "scaler": precision == "fp16"}
    stock = train(STOCK, tmp_path, 20, **arguments)
    ours = train(Trainer, tmp_path, 20, options=options, **arguments)
    in_parts = options is not None and precision != "fp32"
    assert in_parts or bits_agree(
        ours, stock
    )  # Adam makes much of the last bit of a gradient that is zero but for noise
    tolerance = 1e-3 if in_parts else 1e-6  # of a 16-bit forward whose weights differ in a last bit
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=tolerance)
    assert logged(ours, "grad_norm") == pytest.approx(logged(stock, "grad_norm"), rel=max(tolerance, 1e-5))
    assert logged(ours, "learning_rate") == logged(stock, "learning_rate")
    assert ours.state.global_step == 6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_clipped(tmp_path, precision):
    """`max_grad_norm` below every norm there is."""
    arguments = {"max_grad_norm": 0.1, "bf16": precision == "bf16", "scaler": precision == "fp16"}
    stock, ours = train(STOCK, tmp_path, 16, **arguments), train(Trainer, tmp_path, 16, **arguments)
    for a, b in zip(ours.model.parameters(), stock.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, **CLIPPED)
    assert min(logged(ours, "grad_norm")) > 0.1


def test_tokens_are_weighted(tmp_path):
    """One window of 7 samples, with a model that takes `num_items_in_batch`: every token counts the same."""
    model = gpt2()
    ours = build(Trainer, tmp_path, 7, copy.deepcopy(model), sgd, lr_scheduler_type="constant")
    in_order(ours).train()
    assert relative_error(moved(model, ours), truth(model, 7)) < ROUNDING


@pytest.mark.parametrize("scaled", [None, False, True])
def test_loss_functions_of_ones_own(tmp_path, scaled):
    """`compute_loss_func` and `loss_is_scaled_for_ga` mean what they do in the Trainer."""

    def loss_func(outputs, labels, num_items_in_batch=None):
        reduction = "mean" if scaled is False else "sum"
        logits = outputs["logits"][:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits.float(), labels[:, 1:].flatten(), reduction=reduction)
        return loss if scaled is False else loss / num_items_in_batch

    model = gpt2()
    trainers = []
    for cls in (STOCK, Trainer):
        trainer = build(cls, tmp_path, 7, copy.deepcopy(model), sgd, lr_scheduler_type="constant")
        trainer.compute_loss_func = loss_func
        trainer.loss_is_scaled_for_ga = scaled
        in_order(trainer).train()
        trainers.append(trainer)
    stock, ours = (relative_error(moved(model, trainer), truth(model, 7)) for trainer in trainers)
    assert ours < ROUNDING
    assert stock > 0.05 if scaled is False else stock < ROUNDING


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("divided", ["before", "after"])
def test_backwards_of_a_training_step(tmp_path, inside, divided):
    """Of a `training_step` that does not call ours, or that ours calls: all is as in the Trainer.

    It runs `loss.backward()`, or divides the loss after `accelerator.backward(loss)`, as TRL's OnlineDPOTrainer.
    """

    class Own(STOCK):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            if divided == "after":
                self.accelerator.backward(loss)
            loss = loss / self.current_gradient_accumulation_steps
            if divided == "before":
                loss.backward()
            return loss.detach()

    class Called(FusedAccumulationMixin, Own):
        def micro_batch_weight(self, inputs):  # as in the Trainer, which is right for equal ones
            return 1.0

    class Instead(Trainer):
        training_step = Own.training_step

    stock = train(Own, tmp_path, 20, Plain(), sgd, num_train_epochs=2)
    ours = train(Called if inside else Instead, tmp_path, 20, Plain(), sgd, num_train_epochs=2)
    for one, two in zip(stock.model.parameters(), ours.model.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-7)
    for key in ("loss", "grad_norm"):
        assert logged(ours, key) == pytest.approx(logged(stock, key), rel=1e-5)


@pytest.mark.parametrize("kind", ["in place", "one element", "zero", "another"])
def test_a_training_step_returns_another_loss(tmp_path, kind):
    """Than its backward had: all of them are logged, as in the Trainer, not in the proportion of the last."""

    class Own(STOCK):
        calls = 0

        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            self.calls += 1
            if kind == "zero":
                loss = loss * (self.calls % self.args.gradient_accumulation_steps)
            self.accelerator.backward(loss.reshape(1) if kind == "one element" else loss)
            loss = loss.detach()
            loss /= self.current_gradient_accumulation_steps
            return loss + self.calls if kind == "another" else loss

    class Ours(FusedAccumulationMixin, Own):
        def micro_batch_weight(self, inputs):
            return 1.0

    stock = train(Own, tmp_path, 16, Plain(), sgd)
    ours = train(Ours, tmp_path, 16, Plain(), sgd)
    assert logged(ours, "loss") == pytest.approx(logged(stock, "loss"), rel=1e-5)


def test_weight_of_a_micro_batch(tmp_path):
    """Labels that are not -100, after the shift if the loss shifts them; else rows; whatever one says."""
    labels = torch.tensor([[1, 2, -100, 3], [4, -100, -100, 5]])
    assert build(Trainer, tmp_path, 4).micro_batch_weight({"labels": labels}) == 3  # by the name of GPT2LMHeadModel
    trainer = build(Trainer, tmp_path, 4, Plain())
    assert trainer.micro_batch_weight({"labels": labels}) == 5
    trainer._loss_shifts_labels = True
    assert trainer.micro_batch_weight({"labels": labels}) == 3
    assert trainer.micro_batch_weight({"labels": labels, "shift_labels": labels[:1]}) == 3
    assert trainer.micro_batch_weight({"input_ids": labels}) == 2
    assert trainer.micro_batch_weight([{"prompt": "a"}] * 3) == 3

    class Samplewise(FusedAccumulationMixin, STOCK):
        def micro_batch_weight(self, inputs):
            return len(inputs["labels"])

    model = Plain()
    ours = train(Samplewise, tmp_path, 16, copy.deepcopy(model))
    assert bits_agree(ours, train(STOCK, tmp_path, 16, copy.deepcopy(model)))  # 2 samples each: the mean of means


def test_masters_are_resumed(tmp_path):
    """A bf16 model trained through fp32 masters, in one go and in two: the same bits."""
    arguments = {"options": {"master_weights": True}, "save_strategy": "steps", "save_steps": 2}
    whole = train(Trainer, tmp_path / "a", 32, gpt2(torch.bfloat16), **arguments)
    assert all(p.dtype == torch.bfloat16 for p in whole.model.parameters())
    two = build(Trainer, tmp_path / "b", 32, gpt2(torch.bfloat16), **arguments)
    two.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert two.state.global_step == 4
    assert bits_agree(two, whole)
    (tmp_path / "a" / "checkpoint-2" / "accumulator.pt").unlink()  # as another Trainer saves
    three = build(Trainer, tmp_path / "c", 32, gpt2(torch.bfloat16), **arguments)
    three.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert three.state.global_step == 4


def test_masters_are_saved_before_a_step(tmp_path):
    """As `enable_jit_checkpoint` does, which saves before a window's step if SIGTERM has come inside of it."""

    class Saves(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **keywords):
            if state.global_step == 2:
                whole._save_checkpoint(whole.model, None)

    options = {"master_weights": True}
    whole = build(Trainer, tmp_path / "a", 32, gpt2(torch.bfloat16), options=options)
    whole.add_callback(Saves())
    whole.train()
    resumed = build(Trainer, tmp_path / "b", 32, gpt2(torch.bfloat16), options=options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert bits_agree(resumed, whole)
    assert bits_agree(whole, train(Trainer, tmp_path / "c", 32, gpt2(torch.bfloat16), options=options))


@pytest.mark.parametrize("optim", ["sgd", "adamw_torch_fused"])
def test_evaluation_leaves_masters(tmp_path, optim):
    """The Trainer prepares a loader for it, and trains on in the masters' bits."""
    arguments = {"options": {"master_weights": True}, "optim": optim, "num_train_epochs": 2}
    plain = train(Trainer, tmp_path / "a", 16, gpt2(torch.bfloat16), **arguments)
    evaluating = build(Trainer, tmp_path / "b", 16, gpt2(torch.bfloat16), **arguments)
    evaluating.eval_dataset = Samples(4)
    evaluating.args.eval_strategy = "epoch"
    evaluating.train()
    assert len(logged(evaluating, "eval_loss")) == 2
    assert bits_agree(evaluating, plain)


def test_what_train_leaves(tmp_path):
    """The model is free afterwards, and a second `train()` goes on."""
    stock, ours = build(STOCK, tmp_path, 16, bf16=True), build(Trainer, tmp_path, 16, bf16=True)
    for trainer in (stock, ours):
        trainer.train()
        trainer.train()
    assert bits_agree(ours, stock)
    ak.FusedAccumulator(ours.model).remove()
    with pytest.raises(RuntimeError, match="prepare"):
        _ = ours.accumulator


def test_callbacks_see_gradients_before_and_after_the_step(tmp_path):
    """The averaged ones, before the step and after it."""
    seen = []

    class Look(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append([p.grad.clone() for p in model.parameters()])

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append([p.grad.clone() for p in model.parameters()])

    model = gpt2()
    trainer = in_order(build(Trainer, tmp_path, 7, copy.deepcopy(model)))
    trainer.add_callback(Look())
    trainer.train()
    assert len(seen) == 2
    for grads in seen:
        assert relative_error(grads, truth(model, 7)) < ROUNDING


def test_several_gpus_are_refused(tmp_path):
    """torch.nn.DataParallel copies the model."""
    trainer = build(Trainer, tmp_path, 4)
    trainer.args._n_gpu = 2
    with pytest.raises(ValueError, match="2 GPUs in one process"):
        trainer.train()


def test_metrics_are_logged(tmp_path):
    """Of the last window, beside what the Trainer logs."""
    trainer = build(Trainer, tmp_path, 16, Plain())
    trainer._log_windows = True
    trainer.train()
    labels = sum(int((sample["labels"] != -100).sum()) for sample in Samples(16).samples)
    assert sum(logged(trainer, "accumulator/weight")) == labels
    assert logged(trainer, "accumulator/grad_norm") == pytest.approx(logged(trainer, "grad_norm"))
    assert logged(trainer, "accumulator/step_skipped") == [0, 0]


def test_auto_find_batch_size(tmp_path):
    """The Trainer runs its loop anew after an out-of-memory error, with smaller batches."""
    trainer = build(Trainer, tmp_path, 16, per_device_train_batch_size=8, auto_find_batch_size=True)
    compute, sizes = trainer.compute_loss, []

    def compute_loss(model, inputs, *args, **kwargs):
        sizes.append(len(inputs["labels"]))
        if sizes[-1] > 2:
            raise RuntimeError("CUDA out of memory. Tried to allocate 1 EiB")
        return compute(model, inputs, *args, **kwargs)

    trainer.compute_loss = compute_loss
    trainer.train()
    assert sizes[0] == 8
    assert sizes[-1] <= 2
    assert trainer.state.global_step > 0


def test_the_arguments_are_as_they_were(tmp_path):
    """Also that one which our weights of means replace for the length of a step."""
    trainer = build(Trainer, tmp_path, 8, model=Plain())
    assert trainer.args.average_tokens_across_devices
    trainer.train()
    assert trainer.args.average_tokens_across_devices
