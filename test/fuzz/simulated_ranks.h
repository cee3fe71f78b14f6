// Tensors of all ranks of a mesh at once, as numbers: cut from a whole tensor, and compared with one.
//
// Worked case, {1, 2} under P(sum) on two ranks: rank 0 holds noise {n, m}, rank 1 holds {1 - n, 2 - m}.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/naive_shards.h"
#include "propagation/rules/numbers.h"

namespace funcol::test {

// By the rank's place in coordinates(mesh).
using RankTensors = std::vector<Numbers>;

// All numbers that fuzzers draw are multiples of this, so that averages over up to 16 ranks are exact, twice.
constexpr double kUnit = 518400;

// The number that changes nothing in a reduction; averages have none.
double neutral_element(PartialOp op);

// How the ranks' numbers make the whole number of a partial.
enum class PartialForm : uint8_t {
  kNoise,    // every rank has numbers of its own
  kNeutral,  // the first rank has the whole number, the others have neutral elements: a to_partial step
};

// Cuts `whole` for every rank. `noise` chooses the numbers of partials.
RankTensors distributed(const Numbers& whole, const Layout& layout, const Mesh& mesh, uint64_t noise,
                        PartialForm form = PartialForm::kNoise);

// The reduction of the numbers of all ranks along `axes`, whose placements are partials that commute.
double reduction_of(const std::vector<double>& numbers, const std::vector<int64_t>& axes,
                    const Layout& layout, const Mesh& mesh);

// Why the ranks' tensors are not `whole` in this layout; empty if they are. Numbers may differ by this part
// of the largest one.
std::string difference(const RankTensors& tensors, const Numbers& whole, const Layout& layout,
                       const Mesh& mesh, double tolerance = 0);

}  // namespace funcol::test
