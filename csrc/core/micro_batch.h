// What holds for a whole micro-batch: its weight, its loss scale, whether it is dropped, and how it enters the state.
#pragma once

#include "args.h"
#include "arithmetic.h"
#include "flags.h"

namespace accumkernels {

struct MicroBatch {
  double weight;
  double loss_scale;
  bool dropped;
};

// Dereferences the scalars of args, which live where the kernels run.
AK_HOST_DEVICE static inline MicroBatch read_micro_batch(const AccumulateArgs& args) {
  MicroBatch micro_batch;
  micro_batch.weight = args.weight_tensor == nullptr ? args.weight : *args.weight_tensor;
  micro_batch.loss_scale = args.loss_scale == nullptr ? 1.0 : static_cast<double>(*args.loss_scale);
  micro_batch.dropped = args.drop != nullptr && *args.drop != 0.0;
  return micro_batch;
}

AK_HOST_DEVICE static inline bool is_bad_weight(double weight) { return !(weight >= 0.0 && is_finite(weight)); }

template <class Buffer>
AK_HOST_DEVICE static inline Buffer multiplier(const MicroBatch& micro_batch) {
  return static_cast<Buffer>(divide(micro_batch.weight, micro_batch.loss_scale));
}

// By one thread, once per micro-batch and device.
AK_HOST_DEVICE static inline void update_state(const MicroBatch& micro_batch, double* state) {
  const bool bad = is_bad_weight(micro_batch.weight);
  if (micro_batch.dropped || bad) {
    raise(&state[kFoundInf]);
    if (!micro_batch.dropped) raise(&state[kPoisoned]);
  } else {
    state[kWeight] = add(state[kWeight], micro_batch.weight);
    if (micro_batch.weight > 0.0) state[kUsed] += 1.0;
  }
}

// A sum of gradient values or of their products with the multiplier is not finite: the step must be skipped.
AK_HOST_DEVICE static inline void mark_overflow(double* state) {
  raise(&state[kFoundInf]);
  raise(&state[kPoisoned]);
}

// By one thread.
AK_HOST_DEVICE static inline void add_sq_norm(const MicroBatch& micro_batch, const Squares& squares, double* sq_norm) {
  if (micro_batch.dropped) return;
  const double factor = divide(micro_batch.weight, multiply(micro_batch.loss_scale, micro_batch.loss_scale));
  sq_norm[0] = add(sq_norm[0], multiply(factor, squares.gradient));
  sq_norm[1] = add(sq_norm[1], squares.growth);
}

}  // namespace accumkernels
