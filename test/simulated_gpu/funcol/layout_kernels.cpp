// Host implementations of the kernels in csrc/kernels/cuda/rank_major.cu, for the simulated GPU.
//
// A kernel's name holds the type of its one argument, and the argument is all that it works on.
#include <cxxabi.h>
#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <type_traits>
#include <typeinfo>

#include "kernels/cuda/move_vectors.h"
#include "simulated_gpu.h"

namespace funcol::kernels {
namespace {

using simulated_gpu::Launch;
using simulated_gpu::Work;

template <typename Type>
std::string name_of() {
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(typeid(Type).name(), nullptr, nullptr, nullptr), &std::free);
  return name.get();
}

template <typename Move>
void run_on_host(Move move) {
  using Vector = typename Move::Vector;
  move.in = static_cast<const Vector*>(simulated_gpu::host_address(move.in));
  move.out = static_cast<Vector*>(simulated_gpu::host_address(move.out));
  for (typename Move::Index i = 0; i < move.num_vectors; ++i) {
    move(i);
  }
}

template <typename Move>
Work work_of(const Launch& launch) {
  static_assert(std::is_trivially_copyable_v<Move>);
  const Move move = *static_cast<const Move*>(launch.args[0]);
  const size_t num_bytes = move.num_vectors * sizeof(typename Move::Vector);
  return {.name = launch.name,
          .begin = simulated_gpu::at_once([move] { run_on_host(move); }),
          .reads = {{move.in, num_bytes}},
          .writes = {{move.out, num_bytes}}};
}

template <Change kChange, typename Vector>
void register_vector() {
  using Narrow = MoveVectors<kChange, Vector, uint32_t>;
  using Wide = MoveVectors<kChange, Vector, uint64_t>;
  simulated_gpu::register_kernel(name_of<Narrow>(), work_of<Narrow>);
  simulated_gpu::register_kernel(name_of<Wide>(), work_of<Wide>);
}

template <Change kChange>
void register_change() {
  register_vector<kChange, uint4>();
  register_vector<kChange, uint2>();
  register_vector<kChange, uint32_t>();
  register_vector<kChange, uint16_t>();
  register_vector<kChange, uint8_t>();
}

__attribute__((constructor)) void register_all() {
  register_change<Change::kMerge>();
  register_change<Change::kSplit>();
}

}  // namespace
}  // namespace funcol::kernels
