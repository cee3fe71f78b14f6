#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <cstdint>
#include <mutex>

namespace simulated_gpu::aten {
namespace {

uint64_t read_number(const int64_t* address) {
  return static_cast<uint64_t>(*static_cast<const int64_t*>(host_address(address)));
}

}  // namespace

RandomState RandomState::draw(const std::optional<at::Generator>& generator) {
  constexpr uint64_t kShare = 4;  // Philox makes four numbers at once
  const bool is_given = generator && generator->defined();
  at::Generator used = is_given ? *generator : at::cuda::detail::getDefaultCUDAGenerator();
  auto* const cuda_generator = at::check_generator<at::CUDAGeneratorImpl>(used);
  const std::scoped_lock lock(cuda_generator->mutex_);
  RandomState drawn;
  drawn.state_ = cuda_generator->philox_cuda_state(kShare);
  return drawn;
}

at::Generator RandomState::cpu_generator() const {
  if (!state_) {
    return {};
  }
  uint64_t seed = state_->seed_.val;
  uint64_t offset = state_->offset_.val;
  if (state_->captured_) {
    seed = read_number(state_->seed_.ptr);
    offset = read_number(state_->offset_.ptr) + state_->offset_intragraph_;
  }
  constexpr uint64_t kPrime = 1000003;  // sets seeds apart, so that seed 0, offset 4 is not seed 4, offset 0
  return at::detail::createCPUGenerator(seed * kPrime + offset);
}

std::vector<Range> RandomState::reads() const {
  if (!state_ || !state_->captured_) {
    return {};
  }
  return {{state_->seed_.ptr, sizeof(int64_t)}, {state_->offset_.ptr, sizeof(int64_t)}};
}

}  // namespace simulated_gpu::aten
