// Launches the accumulate kernels that Triton's compiler left as PTX, and holds them to reference.cpp.
//
//     python -m benchmarks.compile_report --ptx FOLDER   # leaves a file per kernel
//     triton [--elements N] FOLDER/accumulate_kernel*.ptx
//
// With --elements, the list is a single tensor of N elements, as it takes to count cycles. The driver is loaded when
// the program runs, so that it links where there is none; exit status 77 says so.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "check.h"
#include "reference.h"

namespace {

using namespace accumkernels;
using namespace check;

constexpr int kNoDevice = 77;
constexpr int64_t kBlock = 4096;  // BLOCK and NUM_WARPS of accumkernels/ops/triton_table.py
constexpr unsigned kThreads = 32 * 8;

// The driver's entry points, by their names in its library.
struct Driver {
  int (*load)(void** module, const void* image);
  int (*find)(void** function, void* module, const char* name);
  int (*launch)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned shared,
                void* stream, void** parameters, void** extra);
};

std::optional<Driver> find_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) return std::nullopt;
  Driver driver{};
  driver.load = reinterpret_cast<decltype(driver.load)>(dlsym(library, "cuModuleLoadData"));
  driver.find = reinterpret_cast<decltype(driver.find)>(dlsym(library, "cuModuleGetFunction"));
  driver.launch = reinterpret_cast<decltype(driver.launch)>(dlsym(library, "cuLaunchKernel"));
  return driver;
}

// Name and arguments, such as accumulate_kernel[bf16,fp32], from a file's name.
struct Kernel {
  std::string title;
  DType gradient, buffer;

  bool takes(const char* argument) const { return title.find(argument) != std::string::npos; }
};

std::optional<Kernel> parse(const std::string& path) {
  const std::string title = path.substr(path.find_last_of('/') + 1);
  for (const DType gradient : kDTypes) {
    for (const DType buffer : {DType::kFloat32, DType::kFloat64}) {
      const std::string start = std::string("accumulate_kernel[") + name_of(gradient) + "," + name_of(buffer);
      if (title.compare(0, start.size(), start) == 0) return Kernel{title, gradient, buffer};
    }
  }
  return std::nullopt;
}

void run(const Driver& driver, const Kernel& kernel, const std::string& ptx, const std::vector<int64_t>& sizes) {
  const int64_t n = static_cast<int64_t>(sizes.size());
  Array rows("rows", Array::kInt64, 4 * n), table("table", Array::kInt64, 3 * n + 1), flags("flags", Array::kInt32, n);
  std::vector<Array> grads;
  std::vector<Gradient> gradients;
  std::vector<int32_t> programs;  // each one's tensor
  int64_t end = 0;
  for (int32_t i = 0; i < n; ++i) {
    grads.emplace_back("gradient", kind_of(kernel.gradient), sizes[i]);
    fill(&grads[i], kernel.gradient, static_cast<uint32_t>(i + 1));
    if (i == n / 2) reference::put(kernel.gradient, kInfinity, grads[i].expected<void>(), sizes[i] - 1);
    gradients.push_back({grads[i].expected<void>(), sizes[i], end, i, kernel.gradient, i % 3 == 1});
    const int64_t row[] = {sizes[i], end, i, static_cast<int64_t>(programs.size())};
    std::memcpy(rows.expected<int64_t>() + 4 * i, row, sizeof(row));
    table.expected<int64_t>()[i] = reinterpret_cast<int64_t>(grads[i].device<void>());
    table.expected<int64_t>()[2 * n + i] = gradients[i].overwrite;
    programs.insert(programs.end(), static_cast<size_t>((sizes[i] + kBlock - 1) / kBlock), i);
    end += (sizes[i] + 31) / 32 * 32;
  }
  Array blocks("blocks", Array::kInt32, static_cast<int64_t>(programs.size()));
  std::memcpy(blocks.expected<void>(), programs.data(), programs.size() * sizeof(int32_t));
  Array buffer("buffer", kind_of(kernel.buffer), end), state("state", Array::kFloat64, 4);
  fill(&buffer, kernel.buffer, 99);
  Array weight = scalar("weight", DType::kFloat64, 0.3), loss_scale = scalar("loss scale", DType::kFloat32, 1024.0);
  Array drop = scalar("drop", DType::kFloat64, 0.0);
  Array partials("partials", Array::kFloat64, 2 * blocks.count());
  for (Array& grad : grads) grad.upload();
  for (Array* array : {&rows, &table, &flags, &blocks, &buffer, &state, &weight, &loss_scale, &drop}) array->upload();

  // In the order of the kernel's signature; what is None has no place.
  std::vector<uint64_t> values;
  const auto add = [&](const Array& array) { values.push_back(reinterpret_cast<uint64_t>(array.device<void>())); };
  for (const Array* array : {&buffer, &state, &table, &blocks, &rows}) add(*array);
  values.push_back(static_cast<uint64_t>(n));
  const bool checked = !kernel.takes("unchecked");
  if (checked) add(flags);
  values.push_back(7);  // tag
  for (const Array* array : {&weight, &loss_scale, &drop}) add(*array);
  if (kernel.takes("sq_norm")) add(partials);
  values.push_back(0);                                      // partial_base
  values.push_back(static_cast<uint64_t>(blocks.count()));  // num_partials
  values.insert(values.end(), {0, 0});                      // scratch memory that Triton's kernels may ask for
  std::vector<void*> parameters;
  for (uint64_t& value : values) parameters.push_back(&value);

  void *module = nullptr, *function = nullptr;
  succeed(driver.load(&module, ptx.c_str()), "cuModuleLoadData");
  succeed(driver.find(&function, module, "accumulate_kernel"), "cuModuleGetFunction");
  const char* shared = std::strstr(ptx.c_str(), "// shared ");  // what compile_report writes before the code
  const unsigned bytes = shared ? static_cast<unsigned>(std::atoi(shared + std::strlen("// shared "))) : 0;
  succeed(driver.launch(function, static_cast<unsigned>(blocks.count()), 1, 1, kThreads, 1, 1, bytes, nullptr,
                        parameters.data(), nullptr),
          "cuLaunchKernel");

  AccumulateArgs args{};
  args.buffer = buffer.expected<void>();
  args.buffer_dtype = kernel.buffer;
  args.gradients = gradients.data();
  args.num_gradients = n;
  args.state = state.expected<double>();
  args.flags = checked ? flags.expected<int32_t>() : nullptr;
  args.tag = 7;
  args.weight_tensor = weight.expected<double>();
  args.loss_scale = loss_scale.expected<float>();
  reference::accumulate(args);  // without `count`: another kernel counts
  for (Array* array : {&buffer, &state, &flags, &rows, &table, &blocks}) array->compare();
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<int64_t> sizes(std::begin(kSizes), std::end(kSizes));
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device\n");
    return kNoDevice;
  }
  const std::optional<Driver> driver = find_driver();
  if (!driver) {
    std::printf("no libcuda.so.1\n");
    return kNoDevice;
  }
  succeed(cudaFree(nullptr), "cudaFree");  // makes the device's context the driver's current one
  int failed = 0;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--elements") == 0 && i + 1 < argc) {
      sizes = {std::atoll(argv[++i])};
      continue;
    }
    const std::optional<Kernel> kernel = parse(argv[i]);
    std::ifstream file(argv[i]);
    std::stringstream text;
    text << file.rdbuf();
    if (!kernel || !file) {
      std::printf("%s: no PTX of an accumulate kernel\n", argv[i]);
      ++failed;
      continue;
    }
    std::printf("%s ... ", kernel->title.c_str());
    std::fflush(stdout);
    tally = {};
    run(*driver, *kernel, text.str(), sizes);
    std::printf("%s, %lld values\n", tally.failures == 0 ? "ok" : "FAILED", static_cast<long long>(tally.values));
    failed += tally.failures != 0;
  }
  return failed == 0 ? 0 : 1;
}
