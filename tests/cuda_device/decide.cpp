// decide_, against the reference.
#include <optional>

#include "check.h"
#include "reference.h"

namespace check {
namespace {

using namespace accumkernels;

using Given = std::optional<double>;

struct Window {
  double state[4];  // in the order of State
  Given divisor, norm, max_norm, overflow;
};

void run(const Window& window) {
  Array verdict("verdict", Array::kFloat64, kVerdictCount), single("single", Array::kFloat32, kVerdictCount);
  Array state("state", Array::kFloat64, 4);
  for (int i = 0; i < 4; ++i) state.expected<double>()[i] = window.state[i];
  const Given given[] = {window.divisor, window.norm, window.max_norm, window.overflow};
  std::vector<Array> scalars;
  for (const Given& value : given) scalars.push_back(scalar("scalar", DType::kFloat64, value.value_or(0.0)));
  const auto arguments = [&](bool device) {
    const auto at = [&](int i) -> const double* {
      if (!given[i]) return nullptr;
      return device ? scalars[i].device<double>() : scalars[i].expected<double>();
    };
    return DecideArgs{device ? verdict.device<double>() : verdict.expected<double>(),
                      device ? single.device<float>() : single.expected<float>(),
                      device ? state.device<double>() : state.expected<double>(),
                      at(0),
                      at(1),
                      at(2),
                      at(3)};
  };
  for (Array* array : {&verdict, &single, &state}) array->upload();
  for (Array& array : scalars) array.upload();
  succeed(cuda::decide(arguments(true), nullptr), "decide");
  reference::decide(arguments(false));
  for (Array* array : {&verdict, &single, &state}) array->compare();
}

void windows() {
  const Given none;
  for (const double weight : {0.0, 4.0, 1e-50, 3e300}) {
    for (const double found_inf : {0.0, 1.0}) {
      for (const double poisoned : {0.0, 1.0}) {
        for (const Given& divisor : {none, Given(3.0), Given(0.0), Given(-1.0), Given(kNaN), Given(1e-50)}) {
          run({{weight, found_inf, 2.0, poisoned}, divisor, none, none, none});
          run({{weight, found_inf, 2.0, poisoned}, divisor, Given(7.0), Given(0.1), Given(poisoned)});
          run({{weight, found_inf, 2.0, poisoned}, divisor, Given(kNaN), Given(5.0), Given(1.0 - poisoned)});
        }
      }
    }
  }
}

}  // namespace

const std::vector<Check> kDecide = {
    {"decide/windows", "full, empty, overflowed and poisoned windows; divisors, limits and overflow given or not",
     windows},
};

}  // namespace check
