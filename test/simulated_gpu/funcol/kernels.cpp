// Host implementations of the kernels in csrc/kernels/cuda, for the simulated GPU.
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

#include "kernels/cuda/fill_random.h"
#include "kernels/cuda/move_boxes.h"
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

template <typename Move>
void copy_on_host(Move move) {
  for (uint32_t i = 0; i < move.num_boxes; ++i) {
    auto& box = move.boxes[i];
    box.from = static_cast<const char*>(simulated_gpu::host_address(box.from));
    box.to = static_cast<char*>(simulated_gpu::host_address(box.to));
  }
  for (typename Move::Index i = 0; i < move.count(); ++i) {
    move(i);
  }
}

template <typename Move>
Work work_of_boxes(const Launch& launch) {
  static_assert(std::is_trivially_copyable_v<Move>);
  const Move move = *static_cast<const Move*>(launch.args[0]);
  Work work{.name = launch.name, .begin = simulated_gpu::at_once([move] { copy_on_host(move); })};
  typename Move::Index begin = 0;
  for (uint32_t i = 0; i < move.num_boxes; ++i) {
    const auto& box = move.boxes[i];
    const auto num_rows = (box.end - begin) / box.row_vectors;
    const size_t row_bytes = box.row_vectors * sizeof(typename Move::Vector);
    for (typename Move::Index row = 0; row < num_rows; ++row) {
      const int64_t plane = row / box.num_rows;
      const int64_t in_plane = row % box.num_rows;
      work.reads.push_back(
          {box.from + plane * box.from_strides[0] + in_plane * box.from_strides[1], row_bytes});
      work.writes.push_back({box.to + plane * box.to_strides[0] + in_plane * box.to_strides[1], row_bytes});
    }
    begin = box.end;
  }
  return work;
}

template <typename T>
void fill_on_host(FillRandom<T> fill) {
  fill.out = static_cast<T*>(simulated_gpu::host_address(fill.out));
  fill.seed = static_cast<const int64_t*>(simulated_gpu::host_address(fill.seed));
  for (int64_t i = 0; i < fill.count(); ++i) {
    fill(i);
  }
}

template <typename T>
Work work_of_fill(const Launch& launch) {
  static_assert(std::is_trivially_copyable_v<FillRandom<T>>);
  const FillRandom<T> fill = *static_cast<const FillRandom<T>*>(launch.args[0]);
  int64_t last = 0;  // written, counted from the first
  for (int dim = 0; dim < fill.box.num_dims; ++dim) {
    last += (fill.box.dims[dim].size - 1) * fill.box.dims[dim].local_stride;
  }
  return {.name = launch.name,
          .begin = simulated_gpu::at_once([fill] { fill_on_host(fill); }),
          .reads = {{fill.seed, sizeof(int64_t)}},
          .writes = {{fill.out + fill.box.local, static_cast<size_t>(last + 1) * sizeof(T)}}};
}

template <typename T>
void register_fill() {
  simulated_gpu::register_kernel(name_of<FillRandom<T>>(), work_of_fill<T>);
}

template <Change kChange, typename Vector>
void register_vector() {
  using Narrow = MoveVectors<kChange, Vector, uint32_t>;
  using Wide = MoveVectors<kChange, Vector, uint64_t>;
  simulated_gpu::register_kernel(name_of<Narrow>(), work_of<Narrow>);
  simulated_gpu::register_kernel(name_of<Wide>(), work_of<Wide>);
}

template <typename Vector>
void register_boxes() {
  using Narrow = MoveBoxes<Vector, uint32_t>;
  using Wide = MoveBoxes<Vector, uint64_t>;
  simulated_gpu::register_kernel(name_of<Narrow>(), work_of_boxes<Narrow>);
  simulated_gpu::register_kernel(name_of<Wide>(), work_of_boxes<Wide>);
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
  register_boxes<uint4>();
  register_boxes<uint2>();
  register_boxes<uint32_t>();
  register_boxes<uint16_t>();
  register_boxes<uint8_t>();
  register_fill<float>();
  register_fill<double>();
  register_fill<int64_t>();
  register_fill<bool>();
}

}  // namespace
}  // namespace funcol::kernels
