#include "ops/backend_tensor.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstdint>
#include <fstream>
#include <ios>
#include <sstream>
#include <string>
#include <utility>

#include "async/async_tensor.h"
#include "async/comm_tensor.h"
#include "async/pending_collective.h"
#include "async/wake_key.h"

namespace funcol::backend_tensor_test {
namespace {

// The kernel's flags of the mapping that `address` is in; see VmFlags in proc_pid_smaps(5).
std::string flags_of_mapping(const void* address) {
  const auto wanted = reinterpret_cast<uintptr_t>(address);
  std::ifstream mappings("/proc/self/smaps");
  std::string line;
  bool is_inside = false;
  while (std::getline(mappings, line)) {
    std::istringstream range(line);
    uintptr_t begin = 0;
    uintptr_t end = 0;
    char dash = 0;
    if (range >> std::hex >> begin >> dash >> end && dash == '-') {
      is_inside = begin <= wanted && wanted < end;
    } else if (is_inside && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return "";
}

bool asks_for_large_pages(const void* address) {
  return flags_of_mapping(address).find(" hg ") != std::string::npos;
}

bool asks_for_large_pages(const at::Tensor& tensor) {
  return asks_for_large_pages(static_cast<const char*>(tensor.const_data_ptr()) + tensor.nbytes() / 2);
}

// Returns true if the kernel supports large pages and reports them.
bool large_pages_can_be_seen() {
  constexpr size_t kBytes = size_t{4} << 20;
  auto* const mapping = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const bool seen =
      madvise(mapping, kBytes, MADV_HUGEPAGE) == 0 && asks_for_large_pages(static_cast<char*>(mapping));
  munmap(mapping, kBytes);
  return seen;
}

TEST(FreshTensor, AsksForLargePagesWhereItIsLarge) {
  if (!large_pages_can_be_seen()) {
    GTEST_SKIP() << "this kernel does not tell which mappings ask for large pages";
  }
  const auto like = at::ones({1});
  const bool small_ones_do = asks_for_large_pages(at::empty({7 << 20}));
  EXPECT_EQ(asks_for_large_pages(fresh_tensor({7 << 20}, like)), small_ones_do);
  EXPECT_TRUE(asks_for_large_pages(fresh_tensor({9 << 20}, like)));
}

TEST(FreshTensor, HasTheDtypeOfTheOtherAndIsContiguous) {
  const auto tensor = fresh_tensor({2, 3}, at::ones({4}, at::kHalf));
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({2, 3}));
  EXPECT_EQ(tensor.scalar_type(), at::kHalf);
  EXPECT_TRUE(tensor.is_contiguous());
}

TEST(ContiguousCopy, OfAnySizeHasMemoryOfItsOwn) {
  for (const int64_t num_elements : {0, 5, 100'000, 9 << 20}) {
    const auto tensor = at::arange(num_elements, at::kFloat);
    const auto copy = contiguous_copy(tensor);
    EXPECT_TRUE(copy.equal(tensor)) << num_elements;
    EXPECT_FALSE(copy.is_alias_of(tensor)) << num_elements;
  }
  const auto transposed = at::arange(6).reshape({2, 3}).t();
  EXPECT_TRUE(contiguous_copy(transposed).is_contiguous());
  EXPECT_TRUE(contiguous_copy(transposed).equal(transposed));
}

TEST(ContiguousInput, IsTheSameMemoryInATensorThatPythonDoesNotKnow) {
  const auto tensor = at::arange(12, at::kFloat).reshape({3, 4});
  const auto rows = tensor.narrow(0, 1, 2);
  const auto input = contiguous_input(rows);
  EXPECT_FALSE(input.is_same(rows));
  EXPECT_EQ(input.const_data_ptr(), rows.const_data_ptr());
  EXPECT_TRUE(input.equal(rows));
}

TEST(ContiguousInput, OfAResultIsAPlainTensor) {
  auto output = at::ones({3});
  StartedCollective start;
  start.op = "all_reduce";
  start.outputs = {output};
  const auto result = AsyncTensorImpl::wrap(output, c10::make_intrusive<PendingCollective>(std::move(start)));
  const auto input = contiguous_input(result);
  EXPECT_EQ(AsyncTensorImpl::of(input), nullptr);
  EXPECT_EQ(input.const_data_ptr(), output.const_data_ptr());
  EXPECT_FALSE(input.key_set().has(kWakeKey));
}

TEST(ContiguousInput, OfACommTensorIsThat) {
  const auto tensor = comm_tensor(at::ones({3}));
  EXPECT_TRUE(contiguous_input(tensor).is_same(tensor));
}

TEST(ContiguousInput, IsACopyWhereTheBackendCouldNotReadTheMemory) {
  const auto columns = at::arange(12, at::kFloat).reshape({3, 4}).narrow(1, 1, 2);
  EXPECT_TRUE(contiguous_input(columns).is_contiguous());
  EXPECT_TRUE(contiguous_input(columns).equal(columns));
  const auto conjugate = at::complex(at::ones(2), at::ones(2)).conj();
  EXPECT_FALSE(contiguous_input(conjugate).is_conj());
  EXPECT_TRUE(contiguous_input(conjugate).equal(conjugate));
}

}  // namespace
}  // namespace funcol::backend_tensor_test
