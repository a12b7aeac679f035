// Runs a grid on the host: the threads of a block as fibers, in an order that a seed gives.
//
// A fiber runs until its kernel returns or it waits at a barrier or in a shuffle.
//
// With CUDA_HOST_RACES two threads of the host run blocks at the same time, and every fiber is announced to
// ThreadSanitizer as a thread of its own, so that it sees as ordered what CUDA orders and nothing else: a launch before
// its blocks, __syncthreads among the threads of a block, and the blocks of one runner, whose shared memory lies at the
// same place. Shuffles order nothing. This file itself is compiled without instrumentation.
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>
#include <ucontext.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda_runtime.h"

#ifdef __SANITIZE_ADDRESS__
constexpr bool kAddressSanitizer = true;
#else
constexpr bool kAddressSanitizer = false;
#endif
#ifdef CUDA_HOST_RACES
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
// Never called; the header declares them, and only ThreadSanitizer's runtime has them.
void* __tsan_get_current_fiber() { return nullptr; }
void* __tsan_create_fiber(unsigned) { return nullptr; }
void __tsan_switch_to_fiber(void*, unsigned) {}
void __tsan_acquire(void*) {}
void __tsan_release(void*) {}
#endif

namespace cuda_host {
namespace {

constexpr size_t kStackSize = 256 * 1024;
constexpr unsigned kWarpSize = 32;
constexpr int kRunners = kThreadSanitizer ? 2 : 1;

// Counts arrivals; the last one opens it for all.
struct Barrier {
  unsigned arrived = 0;
  uint64_t generation = 0;
  char order[2];  // addresses by which ThreadSanitizer knows this opening and the next
};

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack = std::make_unique<char[]>(kStackSize);
  dim3 thread;
  bool done = true;
  const Barrier* waits_at = nullptr;
  uint64_t generation = 0;     // of that barrier, until it opens
  void* fake_stack = nullptr;  // AddressSanitizer's, while the fiber is switched out
  void* identity = nullptr;    // ThreadSanitizer's
};

struct Warp {
  Barrier barrier;
  unsigned mask = 0;                  // of the shuffle that lanes have come to
  Value values[2][kWarpSize];         // of this shuffle and the one before, which slower lanes still read
  unsigned shuffles[kWarpSize] = {};  // by lane
};

// Runs one block at a time.
struct Runner {
  ucontext_t main;
  const void* main_stack = nullptr;
  size_t main_stack_size = 0;
  void* main_fake_stack = nullptr;
  void* main_identity = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers;
  Fiber* current = nullptr;
  const std::function<void()>* kernel = nullptr;
  std::exception_ptr error;
  std::mt19937 random;
  Barrier block;
  char block_start, block_end;  // addresses by which ThreadSanitizer knows them
  std::vector<Warp> warps;
};

Runner runners[kRunners];
CUDA_HOST_LOCAL Runner* runner = runners;  // of this thread of the host

void switch_to_main(bool for_good) {
  Fiber* self = runner->current;
  if (kAddressSanitizer) {
    __sanitizer_start_switch_fiber(for_good ? nullptr : &self->fake_stack, runner->main_stack, runner->main_stack_size);
  }
  if (kThreadSanitizer) __tsan_switch_to_fiber(runner->main_identity, __tsan_switch_to_fiber_no_sync);
  swapcontext(&self->context, &runner->main);
  if (kAddressSanitizer) __sanitizer_finish_switch_fiber(self->fake_stack, nullptr, nullptr);
}

void enter() {
  if (kAddressSanitizer) __sanitizer_finish_switch_fiber(nullptr, &runner->main_stack, &runner->main_stack_size);
  if (kThreadSanitizer) __tsan_acquire(&runner->block_start);
  try {
    (*runner->kernel)();
  } catch (...) {  // must not leave the fiber
    runner->error = std::current_exception();
  }
  if (kThreadSanitizer) __tsan_release(&runner->block_end);
  runner->current->done = true;
  switch_to_main(true);
}

void resume(Fiber* fiber) {
  runner->current = fiber;
  threadIdx = fiber->thread;
  if (kAddressSanitizer) __sanitizer_start_switch_fiber(&runner->main_fake_stack, fiber->stack.get(), kStackSize);
  if (kThreadSanitizer) __tsan_switch_to_fiber(fiber->identity, __tsan_switch_to_fiber_no_sync);
  swapcontext(&runner->main, &fiber->context);
  if (kAddressSanitizer) __sanitizer_finish_switch_fiber(runner->main_fake_stack, nullptr, nullptr);
}

void start(Fiber* fiber, unsigned thread) {
  fiber->thread = dim3(thread, 0, 0);
  fiber->done = false;
  fiber->fake_stack = nullptr;
  if (kThreadSanitizer && fiber->identity == nullptr) fiber->identity = __tsan_create_fiber(0);
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack.get();
  fiber->context.uc_stack.ss_size = kStackSize;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, enter, 0);
  resume(fiber);
}

// Returns which opening of the barrier it was.
uint64_t wait(Barrier* barrier, unsigned expected) {
  const uint64_t generation = barrier->generation;
  if (++barrier->arrived == expected) {
    barrier->arrived = 0;
    ++barrier->generation;
  } else {
    runner->current->waits_at = barrier;
    runner->current->generation = generation;
    switch_to_main(false);
  }
  return generation;
}

std::vector<unsigned> in_some_order(unsigned count) {
  std::vector<unsigned> order(count);
  std::iota(order.begin(), order.end(), 0u);
  if (settings.seed != 0) std::shuffle(order.begin(), order.end(), runner->random);
  return order;
}

// Starts every thread, then goes on with those that wait until all are done.
void run_fibers() {
  std::vector<Fiber*> waiting;
  size_t next = 0;  // threads that never wait share a stack, unless ThreadSanitizer takes that for a race
  for (const unsigned thread : in_some_order(blockDim.x)) {
    if (next == runner->fibers.size()) runner->fibers.push_back(std::make_unique<Fiber>());
    Fiber* fiber = runner->fibers[next].get();
    start(fiber, thread);
    if (!fiber->done) waiting.push_back(fiber);
    if (!fiber->done || kThreadSanitizer) ++next;
    if (runner->error) return;
  }
  while (!waiting.empty()) {
    if (settings.seed != 0) std::shuffle(waiting.begin(), waiting.end(), runner->random);
    bool progress = false;
    for (Fiber* fiber : waiting) {
      if (fiber->waits_at->generation == fiber->generation) continue;
      progress = true;
      resume(fiber);
      if (runner->error) return;
    }
    waiting.erase(std::remove_if(waiting.begin(), waiting.end(), [](const Fiber* f) { return f->done; }),
                  waiting.end());
    if (!progress) {
      throw std::runtime_error("block " + std::to_string(blockIdx.x) + ": a barrier that not all threads reach");
    }
  }
}

void run_block() {
  runner->block = {};
  runner->warps.assign((blockDim.x + kWarpSize - 1) / kWarpSize, Warp());
  runner->error = nullptr;
  if (kThreadSanitizer) __tsan_release(&runner->block_start);
  try {
    run_fibers();
    // Before the error is passed on: a thread of the block has made it, and others will read it.
    if (kThreadSanitizer) __tsan_acquire(&runner->block_end);
    if (runner->error) std::rethrow_exception(runner->error);
  } catch (...) {
    runner->fibers.clear();  // some of them are in the middle of the kernel
    throw;
  }
}

// The blocks of a grid that are number `index` modulo kRunners.
void run_blocks(dim3 grid, dim3 block, const std::function<void()>& kernel, int index) {
  runner = &runners[index];
  gridDim = grid;
  blockDim = block;
  runner->kernel = &kernel;
  runner->random.seed(static_cast<unsigned>(settings.seed));
  if (kThreadSanitizer) runner->main_identity = __tsan_get_current_fiber();
  const unsigned count =
      settings.last_blocks > 0 && settings.last_blocks < grid.x ? static_cast<unsigned>(settings.last_blocks) : grid.x;
  for (const unsigned i : in_some_order(count)) {
    if (i % kRunners != static_cast<unsigned>(index)) continue;
    blockIdx = dim3(grid.x - count + i, 0, 0);
    run_block();
  }
}

}  // namespace

void run_grid(dim3 grid, dim3 block, const std::function<void()>& kernel) {
  ++launches;
  if (kRunners == 1) return run_blocks(grid, block, kernel, 0);
  std::exception_ptr errors[kRunners];
  std::vector<std::thread> threads;
  for (int i = 0; i < kRunners; ++i) {
    threads.emplace_back([&, i] {
      try {
        run_blocks(grid, block, kernel, i);
      } catch (...) {
        errors[i] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

void block_barrier() {
  Barrier& barrier = runner->block;
  char* order = &barrier.order[barrier.generation % 2];
  if (kThreadSanitizer) __tsan_release(order);
  wait(&barrier, blockDim.x);
  if (kThreadSanitizer) __tsan_acquire(order);
}

Value exchange(unsigned mask, const Value& mine, unsigned source_lane) {
  if (blockDim.x % kWarpSize != 0) throw std::logic_error("shuffles of part of a warp are not emulated");
  const unsigned lane = threadIdx.x % kWarpSize;
  Warp& warp = runner->warps[threadIdx.x / kWarpSize];
  if (!(mask >> lane & 1u)) throw std::runtime_error("a shuffle by a lane that is not in its mask");
  if (!(mask >> source_lane & 1u)) throw std::runtime_error("a shuffle from a lane that is not in its mask");
  if (warp.barrier.arrived == 0) warp.mask = mask;
  if (warp.mask != mask) throw std::runtime_error("a shuffle whose lanes name different masks");
  Value(&values)[kWarpSize] = warp.values[warp.shuffles[lane]++ % 2];
  values[lane] = mine;
  wait(&warp.barrier, static_cast<unsigned>(__builtin_popcount(mask)));
  return values[source_lane];
}

}  // namespace cuda_host
