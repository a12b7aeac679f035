// What tests/simulated_device/__init__.py calls, through ctypes: no header of Python is needed.
#include <string>
#include <vector>

#include "clock.h"
#include "memory.h"
#include "races.h"

extern "C" {

void sim_on_wait(sim::Callback callback) { sim::on_wait = callback; }
void sim_on_launch(sim::Callback callback) { sim::on_launch = callback; }
void sim_where(const char* text) { sim::where = sim::intern(text); }

void sim_restart() { sim::restart(); }
uint64_t sim_launches() {
  std::lock_guard<std::mutex> guard(sim::lock());
  return sim::launches();
}

// The reports so far, one a line; they are forgotten.
const char* sim_take_reports() {
  static thread_local std::string text;
  text.clear();
  for (const std::string& report : sim::take_reports()) text += report + "\n";
  return text.c_str();
}

void sim_set_limit(int device, size_t bytes) { sim::set_limit(device, bytes); }
void sim_fail_after(int device, int64_t allocations) { sim::fail_after(device, allocations); }
}
