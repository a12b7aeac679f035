// The kernels' host entry points for Python, over raw addresses, and probes of csrc/core.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <tuple>
#include <utility>
#include <vector>

#include "../../csrc/core/args.h"
#include "../../csrc/core/numeric.h"
#include "../../csrc/cuda/table.h"
#include "cuda_runtime.h"

// probes.cpp, compiled as for a GPU and as for the host.
namespace device {
void convert_all(uintptr_t to, int to_dtype, uintptr_t from, int from_dtype, int64_t count);
void is_finite_all(uintptr_t to, uintptr_t from, int dtype, int64_t count);
}  // namespace device
namespace host {
void convert_all(uintptr_t to, int to_dtype, uintptr_t from, int from_dtype, int64_t count);
void is_finite_all(uintptr_t to, uintptr_t from, int dtype, int64_t count);
}  // namespace host

namespace py = pybind11;
using namespace accumkernels;

namespace {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// data, numel, offset, segment, dtype, overwrite
using GradientTuple = std::tuple<uintptr_t, int64_t, int64_t, int32_t, int32_t, bool>;

std::vector<Gradient> gradients_of(const std::vector<GradientTuple>& tuples) {
  std::vector<Gradient> gradients;
  for (const auto& [data, numel, offset, segment, dtype, overwrite] : tuples) {
    gradients.push_back({at<const void>(data), numel, offset, segment, static_cast<DType>(dtype), overwrite});
  }
  return gradients;
}

// As large as the library asks for and not a double larger; NaN shows a partial result that no block wrote. Where
// blocks are left out on purpose they count as 0.
std::vector<double> workspace() {
  return std::vector<double>(cuda::workspace_size(), cuda_host::settings.last_blocks > 0 ? 0.0 : std::nan(""));
}

int accumulate(uintptr_t buffer, int buffer_dtype, const std::vector<GradientTuple>& tuples, uintptr_t layout,
               uintptr_t state, uintptr_t flags, int tag, double weight, uintptr_t weight_tensor, uintptr_t loss_scale,
               uintptr_t drop, uintptr_t sq_norm, bool count) {
  const std::vector<Gradient> gradients = gradients_of(tuples);
  AccumulateArgs args{};
  args.buffer = at<void>(buffer);
  args.buffer_dtype = static_cast<DType>(buffer_dtype);
  args.gradients = gradients.data();
  args.num_gradients = static_cast<int64_t>(gradients.size());
  args.layout = at<const int64_t>(layout);
  args.state = at<double>(state);
  args.flags = at<int32_t>(flags);
  args.tag = tag;
  args.weight = weight;
  args.weight_tensor = at<const double>(weight_tensor);
  args.loss_scale = at<const float>(loss_scale);
  args.drop = at<const double>(drop);
  args.sq_norm = at<double>(sq_norm);
  args.count = count;
  return cuda::accumulate(args, sq_norm == 0 ? nullptr : workspace().data(), nullptr);
}

int check_finite(const std::vector<GradientTuple>& tuples, uintptr_t found_inf, uintptr_t flags, int tag,
                 uintptr_t weight_tensor) {
  const std::vector<Gradient> gradients = gradients_of(tuples);
  CheckFiniteArgs args{};
  args.gradients = gradients.data();
  args.num_gradients = static_cast<int64_t>(gradients.size());
  args.found_inf = at<double>(found_inf);
  args.flags = at<int32_t>(flags);
  args.tag = tag;
  args.weight_tensor = at<const double>(weight_tensor);
  return cuda::check_finite(args, nullptr);
}

int norm(const std::vector<std::tuple<uintptr_t, int64_t, int32_t>>& tuples, uintptr_t out, bool infinity) {
  std::vector<Span> spans;
  for (const auto& [data, numel, dtype] : tuples) {
    spans.push_back({at<const void>(data), numel, static_cast<DType>(dtype)});
  }
  const NormArgs args{spans.data(), static_cast<int64_t>(spans.size()), at<double>(out),
                      infinity ? Norm::kInf : Norm::kL2};
  return cuda::norm(args, workspace().data(), nullptr);
}

int scaled_copy(const std::vector<std::tuple<uintptr_t, uintptr_t, int64_t, int32_t, int32_t>>& tuples,
                uintptr_t divisor, uintptr_t found_inf) {
  std::vector<CopyPair> pairs;
  for (const auto& [output, input, numel, output_dtype, input_dtype] : tuples) {
    pairs.push_back({at<void>(output), at<const void>(input), numel, static_cast<DType>(output_dtype),
                     static_cast<DType>(input_dtype)});
  }
  const ScaledCopyArgs args{pairs.data(), static_cast<int64_t>(pairs.size()), at<const double>(divisor),
                            at<double>(found_inf)};
  return cuda::scaled_copy(args, nullptr);
}

int decide(uintptr_t verdict, uintptr_t single, uintptr_t state, uintptr_t divisor, uintptr_t norm, uintptr_t max_norm,
           uintptr_t overflow) {
  const DecideArgs args{at<double>(verdict),       at<float>(single),      at<const double>(state),
                        at<const double>(divisor), at<const double>(norm), at<const double>(max_norm),
                        at<const double>(overflow)};
  return cuda::decide(args, nullptr);
}

std::pair<int, std::string> probe(int device) {
  char message[256];
  const int error = cuda::probe(device, message, sizeof(message));
  return {error, message};
}

struct Item {
  int64_t numel;
};
struct Entry {
  static constexpr int kBlocks = 4;

  int64_t numel;
  uint32_t first_unit;
};

// What `visit(table, blocks)` gets for each launch over tensors of these sizes, in units of 128 elements.
template <class Visit>
cudaError_t visit_tables(const std::vector<int64_t>& numels, Visit visit) {
  std::vector<Item> items;
  for (const int64_t numel : numels) items.push_back({numel});
  return cuda::launch_in_tables<Entry>(
      items.data(), static_cast<int64_t>(items.size()), false,
      [](const Item& item, Entry* entry) {
        entry->numel = item.numel;
        return unit_of(4);
      },
      [&](const auto& table, int64_t blocks, bool) {
        visit(table, blocks);
        return cudaSuccess;
      });
}

// Tensors, units and blocks of each launch; nothing for a list that is refused.
std::vector<std::tuple<uint32_t, uint32_t, int64_t>> launches_of(const std::vector<int64_t>& numels) {
  std::vector<std::tuple<uint32_t, uint32_t, int64_t>> result;
  const cudaError_t error = visit_tables(
      numels, [&](const auto& table, int64_t blocks) { result.emplace_back(table.count, table.units, blocks); });
  if (error != cudaSuccess) result.clear();
  return result;
}

// (size of the tensor, first, end, step) of the units that a warp takes in a list that fits one launch.
std::vector<std::tuple<int64_t, uint32_t, uint32_t, uint32_t>> units(const std::vector<int64_t>& numels, unsigned block,
                                                                     unsigned warp) {
  std::vector<std::tuple<int64_t, uint32_t, uint32_t, uint32_t>> result;
  visit_tables(numels, [&](const auto& table, int64_t blocks) {
    gridDim.x = static_cast<unsigned>(blocks);
    blockIdx.x = block;
    threadIdx.x = warp * kWarp;
    table.for_each_tensor(
        [&](const auto& entry, Units found) { result.emplace_back(entry.numel, found.first, found.end, found.step); });
  });
  return result;
}

}  // namespace

PYBIND11_MODULE(accumkernels_cuda_host, m) {
  m.def("accumulate", &accumulate, py::kw_only(), py::arg("buffer"), py::arg("buffer_dtype"), py::arg("gradients"),
        py::arg("layout"), py::arg("state"), py::arg("flags"), py::arg("tag"), py::arg("weight"),
        py::arg("weight_tensor"), py::arg("loss_scale"), py::arg("drop"), py::arg("sq_norm"), py::arg("count"));
  m.def("check_finite", &check_finite);
  m.def("norm", &norm);
  m.def("scaled_copy", &scaled_copy);
  m.def("decide", &decide);
  m.def("probe", &probe);
  m.def("workspace_size", &cuda::workspace_size);
  m.def("convert", &device::convert_all);
  m.def("is_finite", &device::is_finite_all);
  m.def("convert_on_host", &host::convert_all);
  m.def("is_finite_on_host", &host::is_finite_all);
  m.def("units", &units);
  m.def("launches_of", &launches_of);
  m.def("launches", [] { return cuda_host::launches; });
  m.def("largest_arguments", [] { return std::exchange(cuda_host::largest_arguments, 0); });
  py::class_<cuda_host::Settings>(m, "Settings")
      .def_readwrite("seed", &cuda_host::Settings::seed)
      .def_readwrite("last_blocks", &cuda_host::Settings::last_blocks)
      .def_readwrite("processors", &cuda_host::Settings::processors)
      .def_readwrite("driver_version", &cuda_host::Settings::driver_version)
      .def_readwrite("device_count", &cuda_host::Settings::device_count)
      .def_readonly("contexts", &cuda_host::Settings::contexts)
      .def_property(
          "image_error", [](const cuda_host::Settings& settings) { return static_cast<int>(settings.image_error); },
          [](cuda_host::Settings& settings, int error) { settings.image_error = static_cast<cudaError_t>(error); });
  m.attr("settings") = py::cast(&cuda_host::settings, py::return_value_policy::reference);
  m.def("reset", [] { cuda_host::settings = {}; });
  m.def("current_device", [] { return cuda_host::current_device; });
}
