// Runs a grid on the host: blocks one after another, the threads of a block as fibers.
//
// A fiber runs until its kernel returns or it waits at a barrier. Threads that never wait share one stack, one after
// the other, so kernels without barriers cost little more than a loop.
#include <sanitizer/common_interface_defs.h>
#include <ucontext.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda_runtime.h"

#ifdef __SANITIZE_ADDRESS__
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif

namespace cuda_host {
namespace {

constexpr size_t kStackSize = 256 * 1024;
constexpr unsigned kWarpSize = 32;

// Counts arrivals; the last one opens it for all.
struct Barrier {
  unsigned arrived = 0;
  uint64_t generation = 0;
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackSize);
  dim3 thread;
  bool done = true;
  const Barrier* waits_at = nullptr;
  uint64_t generation = 0;     // of that barrier, until it opens
  void* fake_stack = nullptr;  // AddressSanitizer's, while the fiber is switched out
};

struct Warp {
  Barrier barrier;
  alignas(16) char values[2][kWarpSize][16];  // of this shuffle and the one before, which slower lanes still read
  unsigned shuffles[kWarpSize] = {};          // by lane
};

struct Scheduler {
  ucontext_t main;
  const void* main_stack = nullptr;
  size_t main_stack_size = 0;
  void* main_fake_stack = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* current = nullptr;
  const std::function<void()>* kernel = nullptr;
  Barrier block;
  std::vector<Warp> warps;
};

Scheduler scheduler;

void switch_to_main(bool for_good) {
  Fiber* self = scheduler.current;
  if (kAddressSanitizer) {
    __sanitizer_start_switch_fiber(for_good ? nullptr : &self->fake_stack, scheduler.main_stack,
                                   scheduler.main_stack_size);
  }
  swapcontext(&self->context, &scheduler.main);
  if (kAddressSanitizer) __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
}

void enter() {
  if (kAddressSanitizer) {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler.main_stack, &scheduler.main_stack_size);
  }
  (*scheduler.kernel)();
  scheduler.current->done = true;
  switch_to_main(true);
}

void resume(Fiber* fiber) {
  scheduler.current = fiber;
  threadIdx = fiber->thread;
  if (kAddressSanitizer) {
    __sanitizer_start_switch_fiber(&scheduler.main_fake_stack, fiber->stack.get(), kStackSize);
  }
  swapcontext(&scheduler.main, &fiber->context);
  if (kAddressSanitizer) __sanitizer_finish_switch_fiber(scheduler.main_fake_stack, nullptr, nullptr);
}

void start(Fiber* fiber, unsigned thread) {
  fiber->thread = dim3(thread, 0, 0);
  fiber->done = false;
  fiber->fake_stack = nullptr;
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackSize;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, enter, 0);
  resume(fiber);
}

void wait(Barrier* barrier, unsigned expected) {
  if (++barrier->arrived == expected) {
    barrier->arrived = 0;
    ++barrier->generation;
    return;
  }
  scheduler.current->waits_at = barrier;
  scheduler.current->generation = barrier->generation;
  switch_to_main(false);
}

void run_block() {
  const unsigned threads = blockDim.x;
  scheduler.block = {};
  scheduler.warps.assign((threads + kWarpSize - 1) / kWarpSize, Warp());
  size_t waiting = 0;  // the first so many fibers wait at a barrier
  for (unsigned i = 0; i < threads; ++i) {
    if (waiting == scheduler.fibers.size()) scheduler.fibers.push_back(std::make_unique<Fiber>());
    Fiber* fiber = scheduler.fibers[waiting].get();
    start(fiber, settings.reversed ? threads - 1 - i : i);
    if (!fiber->done) ++waiting;
  }
  for (size_t left = waiting; left > 0;) {
    bool progress = false;
    for (size_t i = 0; i < waiting; ++i) {
      Fiber* fiber = scheduler.fibers[i].get();
      if (fiber->done || fiber->waits_at->generation == fiber->generation) continue;
      progress = true;
      resume(fiber);
      if (fiber->done) --left;
    }
    if (!progress) {
      scheduler.fibers.clear();
      throw std::runtime_error("block " + std::to_string(blockIdx.x) + ": a barrier that not all threads reach");
    }
  }
}

}  // namespace

void run_grid(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  ++launches;
  gridDim = grid;
  blockDim = block;
  scheduler.kernel = &kernel;
  const int64_t blocks = grid.x;
  const int64_t first = settings.last_blocks > 0 && settings.last_blocks < blocks ? blocks - settings.last_blocks : 0;
  for (int64_t i = first; i < blocks; ++i) {
    blockIdx = dim3(static_cast<unsigned>(settings.reversed ? blocks - 1 - (i - first) : i), 0, 0);
    run_block();
  }
}

void block_barrier() { wait(&scheduler.block, blockDim.x); }

void exchange(const void* mine, void* theirs, size_t size, int source_lane) {
  Warp& warp = scheduler.warps[threadIdx.x / kWarpSize];
  const unsigned lane = threadIdx.x % kWarpSize;
  char (&values)[kWarpSize][16] = warp.values[warp.shuffles[lane]++ % 2];
  if (blockDim.x % kWarpSize != 0 || size > sizeof(values[0])) throw std::logic_error("shuffle not emulated");
  memcpy(values[lane], mine, size);
  wait(&warp.barrier, kWarpSize);
  memcpy(theirs, values[source_lane], size);
}

}  // namespace cuda_host
