#include "issue.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/isnan.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>

#include "aliases.h"
#include "places.h"
#include "ranges.h"

namespace simulated_gpu::aten {
namespace {

std::string new_number() {
  static std::atomic<int64_t> next{0};
  static const char* const text = std::getenv("SIMULATED_GPU_BREAK");
  static const int64_t breaks_at = text != nullptr ? std::strtoll(text, nullptr, 10) : -1;
  const int64_t number = next++;
  TORCH_CHECK(number != breaks_at, "simulated GPU: operation ", number,
              ", at which SIMULATED_GPU_BREAK stops");
  return std::to_string(number);
}

bool looks_for_nan() {
  static const char* const text = std::getenv("SIMULATED_GPU_NAN");
  static const bool looks = text != nullptr && std::string(text) == "1";
  return looks;
}

// Reports the first tensors that hold NaN, no more than a process may.
void look_for_nan(const std::string& name, const std::vector<at::Tensor>& tensors, const IssuePlace* place) {
  constexpr int kMaxReports = 10;
  static std::atomic<int> num_reports{0};
  for (const at::Tensor& tensor : tensors) {
    if (num_reports >= kMaxReports) {
      return;
    }
    if (!tensor.is_floating_point() || tensor.numel() == 0 ||
        !at::isnan(tensor.to(at::kFloat)).any().item<bool>()) {
      continue;
    }
    ++num_reports;
    std::string text = name + " reads NaN in a tensor of " + std::to_string(tensor.numel()) + " elements.";
    report(place != nullptr ? text + "\n" + place->text() : text);
  }
}

void add_all_ranges(const std::vector<at::Tensor>& tensors, std::vector<Range>& ranges) {
  for (const at::Tensor& tensor : tensors) {
    add_ranges(tensor, ranges);
  }
}

// An element that is at several places of a tensor, as after expand(), counts once.
size_t bytes_of(const std::vector<at::Tensor>& tensors) {
  size_t size = 0;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != at::kStrided) {
      continue;
    }
    size_t count = tensor.numel() == 0 ? 0 : tensor.itemsize();
    for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
      count *= tensor.stride(dim) == 0 ? 1 : static_cast<size_t>(tensor.size(dim));
    }
    size += count;
  }
  return size;
}

std::function<void()> with_look_for_nan(const std::string& name, const Tensors& tensors,
                                        std::function<void()> run) {
  std::vector<at::Tensor> aliases;
  for (const at::Tensor& tensor : tensors.read) {
    if (tensor.is_cuda()) {
      aliases.push_back(cpu_alias(tensor));
    }
  }
  return [name, aliases = std::move(aliases), place = find_issue_place(), run = std::move(run)] {
    look_for_nan(name, aliases, place.get());
    run();
  };
}

}  // namespace

void issue(const std::string& name, const Tensors& tensors, std::function<void()> run, Amount amount) {
  const TracedCall call;
  Work work;
  work.name = name + "#" + new_number();
  work.amount = std::move(amount);
  if (!options().trace_file.empty()) {
    work.amount.read = bytes_of(tensors.read) + bytes_of(tensors.updated);
    work.amount.written = bytes_of(tensors.updated) + bytes_of(tensors.written);
  }
  if (options().races) {
    work.reads = tensors.numbers;
    add_all_ranges(tensors.read, work.reads);
    add_all_ranges(tensors.updated, work.reads);
    add_all_ranges(tensors.updated, work.writes);
    add_all_ranges(tensors.written, work.writes);
  }
  if (looks_for_nan()) {
    run = with_look_for_nan(work.name, tensors, std::move(run));
  }
  work.begin = at_once([run = std::move(run)] {
    const at::NoGradGuard no_gradients;
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    try {
      run();
    } catch (const c10::Error& error) {
      throw std::runtime_error(error.what_without_backtrace());
    }
  });
  C10_CUDA_CHECK(enqueue(c10::cuda::getCurrentCUDAStream(), std::move(work)));
}

}  // namespace simulated_gpu::aten
