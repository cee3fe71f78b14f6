// Random numbers for the shards of a tensor, equal for every way to shard it.
//
//   draw(like, distribution, numbers, shape, cuts, generator)    returns a tensor like `like`
//   draw_(self, ...)                                             fills `self`, which is such a shard
//
// `like` is this rank's shard of a tensor of `shape`. `cuts` has four numbers for each Shard in the order in
// which axes cut: the dim, the number of ranks, the index of this rank among them, the split factor. A call
// takes one 64-bit number from the generator, also for an empty shard; each element has the number of its
// position in the full tensor (kernels/random.h). So ranks whose generators agree draw the numbers of
// one tensor, and generators still agree afterwards.
//
// `numbers` are those of kernels/random.h for the distributions "uniform", "normal", "log_normal", "cauchy",
// "exponential", "geometric" and "bernoulli". For "integers" they are the lowest and the highest one.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "kernels/cuda_library.h"
#include "kernels/random.h"
#include "layout/positions.h"
#include "ops/operator.h"

namespace funcol {
namespace {

using at::Tensor;
using kernels::Distribution;
using kernels::RandomKey;
using kernels::RandomNumbers;

struct NamedDistribution {
  std::string_view name;
  Distribution distribution;
  size_t num_numbers;
};

constexpr std::array<NamedDistribution, 8> kDistributions = {{
    {"uniform", Distribution::kUniform, 2},
    {"normal", Distribution::kNormal, 2},
    {"log_normal", Distribution::kLogNormal, 2},
    {"cauchy", Distribution::kCauchy, 2},
    {"exponential", Distribution::kExponential, 1},
    {"geometric", Distribution::kGeometric, 1},
    {"bernoulli", Distribution::kBernoulli, 1},
    {"integers", Distribution::kIntegers, 2},
}};

const NamedDistribution& find_distribution(std::string_view name) {
  const auto* const found = std::ranges::find(kDistributions, name, &NamedDistribution::name);
  TORCH_CHECK_VALUE(found != kDistributions.end(), "funcol::draw: no distribution is called '", name,
                    "'. Pass one of uniform, normal, log_normal, cauchy, exponential, geometric, bernoulli, "
                    "integers.");
  return *found;
}

// Raises the errors of PyTorch's operators of the same name.
void check_numbers(const NamedDistribution& named, double a, double b) {
  switch (named.distribution) {
    case Distribution::kUniform:
      TORCH_CHECK(a <= b && b - a <= std::numeric_limits<double>::max(),
                  "uniform_ expects to return a [from, to) range, but found from=", a, " > to=", b,
                  ". Pass finite bounds in this order.");
      break;
    case Distribution::kNormal:
      TORCH_CHECK(b >= 0, "normal expects std >= 0.0, but found std ", b);
      break;
    case Distribution::kLogNormal:
      TORCH_CHECK(b > 0, "log_normal_ expects std > 0.0, but found std=", b);
      break;
    case Distribution::kCauchy:
      TORCH_CHECK(b > 0, "cauchy_ expects sigma > 0.0, but found sigma=", b);
      break;
    case Distribution::kExponential:
      TORCH_CHECK(a > 0, "exponential_ expects lambda > 0.0, but found lambda=", a);
      break;
    case Distribution::kGeometric:
      TORCH_CHECK(a > 0 && a < 1, "geometric_ expects p to be in (0, 1), but got p=", a);
      break;
    case Distribution::kBernoulli:
      TORCH_CHECK(a >= 0 && a <= 1, "bernoulli_ expects p to be in [0, 1], but got p=", a);
      break;
    case Distribution::kIntegers:
      break;
  }
}

// Returns the number of random bits of a uniform number of this dtype: those that its mantissa holds.
int num_digits(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return 11;
    case at::kBFloat16:
      return 8;
    default:
      return 24;
  }
}

void check_dtype(at::ScalarType dtype, const NamedDistribution& named) {
  const bool supports_integers = named.distribution == Distribution::kIntegers ||
                                 named.distribution == Distribution::kGeometric ||
                                 named.distribution == Distribution::kBernoulli;
  TORCH_CHECK_NOT_IMPLEMENTED(at::isFloatingType(dtype) || supports_integers, "funcol::draw: '", named.name,
                              "' numbers are not implemented for ", dtype,
                              ". Draw them into a tensor of a floating-point dtype.");
}

RandomNumbers random_numbers(std::string_view name, at::ArrayRef<at::Scalar> numbers, at::ScalarType dtype) {
  const auto& named = find_distribution(name);
  check_dtype(dtype, named);
  TORCH_CHECK_VALUE(numbers.size() == named.num_numbers, "funcol::draw: '", name, "' takes ",
                    named.num_numbers, " numbers, got ", numbers.size(), ".");
  RandomNumbers drawn{.distribution = named.distribution, .num_digits = num_digits(dtype)};
  if (named.distribution == Distribution::kIntegers) {
    const auto low = numbers[0].to<int64_t>();
    const auto high = numbers[1].to<int64_t>();
    TORCH_CHECK(low <= high, "random_ expects 'from' to be less than 'to', but got from=", low,
                " >= to=", high, " + 1.");
    drawn.low = low;
    drawn.range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low) + 1;
    return drawn;
  }
  for (size_t i = 0; i < numbers.size(); ++i) {
    drawn.numbers[i] = numbers[i].to<double>();
  }
  check_numbers(named, drawn.numbers[0], drawn.numbers[1]);
  return drawn;
}

Positions positions_of(const std::vector<int64_t>& shape, at::IntArrayRef cuts) {
  TORCH_CHECK_VALUE(cuts.size() % 4 == 0, "funcol::draw: `cuts` has four numbers for each cut, got ", cuts);
  std::vector<ShardCut> each;
  for (size_t i = 0; i < cuts.size(); i += 4) {
    each.push_back({cuts[i], cuts[i + 1], cuts[i + 2], cuts[i + 3]});
    const auto& [dim, num_ranks, index, split_factor] = each.back();
    TORCH_CHECK_VALUE(dim >= 0 && dim < static_cast<int64_t>(shape.size()) && index >= 0 &&
                          index < num_ranks && split_factor > 0,
                      "funcol::draw: no cut of a tensor of shape ", at::IntArrayRef(shape), ": ", cuts);
  }
  return {shape, each};
}

RandomKey next_key(const std::optional<at::Generator>& given) {
  auto* const generator =
      at::get_generator_or_default<at::CPUGeneratorImpl>(given, at::detail::getDefaultCPUGenerator());
  const std::scoped_lock lock(generator->mutex_);
  return {.seed = generator->random64(), .offset = 0};
}

// Fills `out`, which is contiguous and of a dtype that the kernels write.
template <typename T>
void fill_on_cpu(const Tensor& out, const RandomNumbers& numbers, const RandomKey& key,
                 const Positions& positions) {
  constexpr int64_t kGrain = 4096;
  auto* const data = out.mutable_data_ptr<T>();
  at::parallel_for(0, out.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin += kGrain) {
      for (const auto& run : positions.runs(begin, std::min(begin + kGrain, end))) {
        kernels::fill_random(data + run.local, numbers, key, run.full, run.size);
      }
    }
  });
}

// Returns the next number of a device's generator, in the device's memory. PyTorch's operator draws it, so
// that replays of a CUDA graph draw new ones.
Tensor next_seed(const Tensor& like, const std::optional<at::Generator>& given) {
  return at::empty({}, like.options().dtype(at::kLong)).random_(given);
}

kernels::RandomBox random_box(const PositionBox& box) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      box.dims.size() <= size_t{kernels::RandomBox::kMaxDims}, "funcol::draw: a shard has ", box.dims.size(),
      " dims that do not join, at most ", kernels::RandomBox::kMaxDims, " are supported. Shard fewer dims.");
  kernels::RandomBox copied{.local = box.local, .full = box.full};
  for (const auto& [size, local_stride, full_stride] : box.dims) {
    copied.dims[copied.num_dims++] = {size, local_stride, full_stride};
  }
  return copied;
}

template <typename T>
void fill_on_cuda(const Tensor& out, const RandomNumbers& numbers, const Tensor& seed,
                  const Positions& positions) {
  const c10::DeviceGuard device(out.device());
  const auto stream = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStream(out.device());
  const auto* const functions = kernels::cuda_library().functions;
  for (const auto& box : positions.boxes()) {
    const char* const error = functions == nullptr
                                  ? kernels::why_no_cuda_kernels()
                                  : std::get<kernels::CudaFunctions::FillRandom<T>>(functions->fill_random)(
                                        out.mutable_data_ptr<T>(), numbers, seed.const_data_ptr<int64_t>(),
                                        random_box(box), stream.native_handle());
    TORCH_CHECK(error == nullptr, "funcol::draw: the kernel failed on ", out.device(), ": ", error);
  }
}

// Returns the dtype in which numbers for a tensor of `dtype` are computed.
at::ScalarType computation_dtype(at::ScalarType dtype, Distribution distribution) {
  if (dtype == at::kDouble || dtype == at::kFloat || dtype == at::kLong || dtype == at::kBool) {
    return dtype;
  }
  if (distribution == Distribution::kBernoulli) {
    return at::kBool;
  }
  return at::isIntegralType(dtype, /*includeBool=*/false) ? at::kLong : at::kFloat;
}

// Calls `fill_as`, a generic lambda, with a value of the type of the elements of `dtype`.
template <typename FillAs>
void visit_type(at::ScalarType dtype, const FillAs& fill_as) {
  switch (dtype) {
    case at::kFloat:
      return fill_as(float{});
    case at::kDouble:
      return fill_as(double{});
    case at::kLong:
      return fill_as(int64_t{});
    default:
      return fill_as(bool{});
  }
}

void fill(const Tensor& self, const RandomNumbers& numbers, const Positions& positions,
          const std::optional<at::Generator>& generator) {
  const auto dtype = computation_dtype(self.scalar_type(), numbers.distribution);
  const bool is_filled_directly = self.is_contiguous() && self.scalar_type() == dtype;
  const auto out = is_filled_directly
                       ? self
                       : at::empty_like(self, self.options().dtype(dtype), at::MemoryFormat::Contiguous);
  if (self.is_cuda()) {
    const auto seed = next_seed(self, generator);
    visit_type(dtype, [&]<typename T>(T) { fill_on_cuda<T>(out, numbers, seed, positions); });
  } else {
    const auto key = next_key(generator);
    visit_type(dtype, [&]<typename T>(T) { fill_on_cpu<T>(out, numbers, key, positions); });
  }
  if (!is_filled_directly) {
    self.copy_(out);
  }
}

// The arguments after the first.
using Numbers = at::ArrayRef<at::Scalar>;
using Generator = std::optional<at::Generator>;

void draw_(const Tensor& self, std::string_view distribution, Numbers numbers, at::IntArrayRef shape,
           at::IntArrayRef cuts, const Generator& generator) {
  const auto drawn = random_numbers(distribution, numbers, self.scalar_type());
  const auto positions = positions_of(shape.vec(), cuts);
  TORCH_CHECK_VALUE(positions.numel() == self.numel(), "funcol::draw: the local tensor has shape ",
                    self.sizes(), ", but this rank's shard of a tensor of shape ", shape, " has ",
                    positions.numel(),
                    " elements. Pass shape= and stride= of the full tensor to DTensor.from_local().");
  fill(self, drawn, positions, generator);
}

Tensor draw(const Tensor& like, std::string_view distribution, Numbers numbers, at::IntArrayRef shape,
            at::IntArrayRef cuts, const Generator& generator) {
  auto drawn = at::empty_like(like);
  draw_(drawn, distribution, numbers, shape, cuts, generator);
  return drawn;
}

void draw_meta_(const Tensor& /*self*/, std::string_view /*distribution*/, Numbers /*numbers*/,
                c10::SymIntArrayRef /*shape*/, at::IntArrayRef /*cuts*/, const Generator& /*generator*/) {}

Tensor draw_meta(const Tensor& like, std::string_view /*distribution*/, Numbers /*numbers*/,
                 c10::SymIntArrayRef /*shape*/, at::IntArrayRef /*cuts*/, const Generator& /*generator*/) {
  return at::empty_like(like);
}

template <typename Kernel, typename Meta>
Operator random_operator(const char* name, Kernel* kernel, Meta* meta) {
  Operator op({.name = name});
  op.set_kernel(c10::DispatchKey::CPU, torch::CppFunction(kernel));
  op.set_kernel(c10::DispatchKey::CUDA, torch::CppFunction(kernel));
  op.set_kernel(c10::DispatchKey::Meta, torch::CppFunction(meta));
  return op;
}

const auto kDraw = random_operator("draw", draw, draw_meta);
const auto kDrawInPlace = random_operator("draw_", draw_, draw_meta_);

}  // namespace
}  // namespace funcol
