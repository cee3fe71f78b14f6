// Products of vectors and matrices, as contractions.
#include <algorithm>
#include <string>

#include "propagation/rules/dim_map.h"
#include "propagation/rules/rule_table.h"

namespace funcol::matrix_rules {
namespace {

// A sum of products over the letters that the output lacks. "mk,kn->mn" is the product of matrices.
struct Contraction {
  std::vector<std::string> inputs;
  std::string output;
};

std::optional<int64_t> place_of(char letter, const std::string& letters) {
  const auto place = letters.find(letter);
  return place == std::string::npos ? std::nullopt : std::optional(static_cast<int64_t>(place));
}

// A row: the placement of the output, and those of the inputs.
using ContractionRow = std::pair<Placement, std::vector<Placement>>;

// Returns a row for each letter to shard, all but those of `unsharded`; then rows with one partial input
// each.
std::vector<ContractionRow> contraction_rows(const Contraction& contraction,
                                             const std::string& unsharded = "") {
  std::string letters = contraction.output;
  for (const auto& input : contraction.inputs) {
    for (const char letter : input) {
      if (!place_of(letter, letters)) {
        letters += letter;
      }
    }
  }
  std::vector<ContractionRow> rows;
  for (const char letter : letters) {
    if (place_of(letter, unsharded)) {
      continue;
    }
    const auto in_output = place_of(letter, contraction.output);
    std::vector<Placement> inputs;
    for (const auto& input : contraction.inputs) {
      const auto dim = place_of(letter, input);
      inputs.push_back(dim ? any_shard(*dim) : replicate());
    }
    rows.emplace_back(in_output ? any_shard(*in_output) : partial(), inputs);
  }
  for (const auto op : kLinearOps) {
    for (size_t i = 0; i < contraction.inputs.size(); ++i) {
      std::vector<Placement> inputs(contraction.inputs.size(), replicate());
      inputs[i] = partial(op);
      rows.emplace_back(partial(op), inputs);
    }
  }
  return rows;
}

Rows contracted(const OpCall& call, const Contraction& contraction) {
  RowList rows(call);
  for (const auto& [output, inputs] : contraction_rows(contraction)) {
    rows.add_arithmetic(output, inputs);
  }
  return rows.allowing_empty_shards();
}

Rule contraction(const Contraction& contraction) {
  return [contraction](const OpCall& call) { return contracted(call, contraction); };
}

// Returns the placement of a summand that is broadcast to the result.
Placement summand_placement(const TensorMeta& summand, const Placement& result, int64_t num_dims) {
  return result.is_shard() ? broadcast_shard(summand, result.dim, num_dims) : result;
}

// Returns the rows of beta * summand + alpha * contraction. The summand of a partial sum is a partial sum.
// The summand of a partial average is a partial average, or is replicated.
Rows contracted_onto(const OpCall& call, const Contraction& contraction, size_t summand_number) {
  RowList rows(call);
  const auto& summand = call.tensors.at(summand_number);
  const auto num_dims = static_cast<int64_t>(contraction.output.size());
  const auto add = [&](const Placement& output, std::vector<Placement> inputs, const Placement& placement) {
    inputs.insert(inputs.begin() + static_cast<int64_t>(summand_number), placement);
    rows.add_arithmetic(output, std::move(inputs));
  };
  for (const auto& [output, inputs] : contraction_rows(contraction)) {
    add(output, inputs, summand_placement(summand, output, num_dims));
    if (output == partial(PartialOp::kAvg)) {
      add(output, inputs, replicate());
    }
  }
  return rows.allowing_empty_shards();
}

Rule contraction_onto_self(const Contraction& contraction) {
  return [contraction](const OpCall& call) { return contracted_onto(call, contraction, 0); };
}

// Returns the rows of linear(input, weight, bias): input[*, k] weight[n, k], or weight[k].
Rows linear_layer(const OpCall& call) {
  const auto& input = call.tensor("input");
  std::string batch;
  for (int64_t dim = 0; dim + 1 < input.num_dims(); ++dim) {
    batch += static_cast<char>('a' + dim);
  }
  const bool has_rows = call.tensor("weight").num_dims() == 2;
  const Contraction contraction{{batch + "K", has_rows ? "NK" : "K"}, has_rows ? batch + "N" : batch};
  return has_tensor(call, "bias") ? contracted_onto(call, contraction, 2) : contracted(call, contraction);
}

// A float8 matrix has one scale, or a scale for each row or each block. The scales have the dims of the
// matrix, or are one dim of tiles of 128 rows.
constexpr int64_t kRowsOfATile = 128;

// Returns the placement of the scale beside `matrix`. Returns nullopt if the scale cannot be sharded like the
// matrix: tiles consist of rows of the dim that is not summed.
std::optional<Placement> scale_placement(const TensorMeta& scale, const Placement& matrix,
                                         int64_t summed_dim) {
  const bool is_one = std::ranges::all_of(scale.shape, [](int64_t size) { return size == 1; });
  if (!matrix.is_shard() || is_one) {
    return replicate();
  }
  if (scale.num_dims() == 1) {
    return matrix.dim == summed_dim ? std::nullopt : std::optional(any_shard(0));
  }
  return scale.shape.at(matrix.dim) == 1 ? replicate() : any_shard(matrix.dim);
}

// Returns true if every rank's scales belong to its shard of the matrix.
bool scale_follows(const TensorMeta& matrix, const Layout& matrix_layout, const TensorMeta& scale,
                   const Layout& scale_layout, int64_t summed_dim, const Mesh& mesh) {
  if (scale.num_dims() == 1) {
    const int64_t dim = 1 - summed_dim;
    const bool is_cut = !scale_layout.axes_of(0).empty();
    return !is_cut ||
           (is_cut_evenly(scale_layout, mesh, 0, scale.shape[0]) && matrix.shape[dim] % kRowsOfATile == 0 &&
            is_cut_evenly(matrix_layout, mesh, dim, matrix.shape[dim] / kRowsOfATile));
  }
  for (int64_t dim = 0; dim < scale.num_dims(); ++dim) {
    if (scale.shape[dim] != matrix.shape[dim] && !is_cut_evenly(scale_layout, mesh, dim, scale.shape[dim])) {
      return false;
    }
  }
  return true;
}

bool scales_follow(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  return scale_follows(call.tensors[0], composition.inputs[0], call.tensors[2], composition.inputs[2], 1,
                       mesh) &&
         scale_follows(call.tensors[1], composition.inputs[1], call.tensors[3], composition.inputs[3], 0,
                       mesh);
}

// Returns the rows of _scaled_mm(self, mat2, scale_a, scale_b, bias, scale_result).
Rows scaled_mm(const OpCall& call) {
  RowList rows(call);
  const bool has_bias = has_tensor(call, "bias");
  if (has_tensor(call, "scale_result")) {
    return {};
  }
  for (const auto& [output, inputs] : contraction_rows({{"mk", "kn"}, "mn"})) {
    const auto scale_a = scale_placement(call.tensor("scale_a"), inputs[0], 1);
    const auto scale_b = scale_placement(call.tensor("scale_b"), inputs[1], 0);
    if (!scale_a || !scale_b || (has_bias && !output.is_shard())) {
      continue;
    }
    const auto bias = output == any_shard(1) ? any_shard(0) : replicate();
    rows.add(output, {{"self", inputs[0]},
                      {"mat2", inputs[1]},
                      {"scale_a", *scale_a},
                      {"scale_b", *scale_b},
                      {"bias", bias}});
  }
  return rows.refusing_empty_shards(scales_follow);
}

// Returns true if every shard of the contiguous dim is a multiple of 16 bytes long: the rows of a row-major
// matrix, and the columns of a column-major one, have to begin at multiples of 16 bytes.
bool has_aligned_shards(const TensorMeta& matrix, const Layout& layout, const Mesh& mesh) {
  constexpr int64_t kAlignment = 16;
  const int64_t last = matrix.num_dims() - 1;
  const bool is_column_major =
      matrix.stride[last - 1] == 1 && matrix.stride[last] >= std::max<int64_t>(1, matrix.shape[last - 1]);
  const int64_t dense = is_column_major ? last - 1 : last;
  return for_all_coordinates(mesh, layout.axes_of(dense), [&](const Coordinate& coordinate) {
    return layout.axes_of(dense).empty() ||
           local_shape(layout, mesh, matrix.shape, coordinate)[dense] * itemsize(matrix.dtype) % kAlignment ==
               0;
  });
}

bool are_aligned(const OpCall& call, const Composition& composition, const Mesh& mesh) {
  return has_aligned_shards(call.tensors[0], composition.inputs[0], mesh) &&
         has_aligned_shards(call.tensors[1], composition.inputs[1], mesh);
}

// Returns the rows of _grouped_mm(self, mat2, offs). The groups are the matrices of a batch, or follow each
// other along the rows of self, the columns of mat2, or the dim that is summed. That dim is not sharded,
// because `offs`, the ends of the groups, is known to the kernel alone.
Rows grouped_mm(const OpCall& call) {
  if (has_tensor(call, "bias")) {
    return {};
  }
  const bool is_batch = call.tensor("self").num_dims() == 3;
  const bool is_batch2 = call.tensor("mat2").num_dims() == 3;
  const Contraction contraction{{is_batch ? "gmk" : "mk", is_batch2 ? "gkn" : "kn"},
                                is_batch == is_batch2 ? "gmn" : "mn"};
  const std::string unsharded = is_batch && is_batch2 ? "" : is_batch ? "gn" : is_batch2 ? "gm" : "gk";
  RowList rows(call);
  for (const auto& [output, inputs] : contraction_rows(contraction, unsharded)) {
    rows.add_arithmetic(output, {{"self", inputs[0]}, {"mat2", inputs[1]}});
  }
  return rows.refusing_empty_shards(are_aligned);
}

}  // namespace

void add(RuleTable& table) {
  table.add_operators({"aten::dot", "aten::vdot"}, contraction({{"i", "i"}, ""}));
  table.add_operators({"aten::mv"}, contraction({{"mk", "k"}, "m"}));
  table.add_operators({"aten::mm"}, contraction({{"mk", "kn"}, "mn"}));
  table.add_operators({"aten::bmm"}, contraction({{"bmk", "bkn"}, "bmn"}));
  table.add_operators({"aten::addmv"}, contraction_onto_self({{"mk", "k"}, "m"}));
  table.add_operators({"aten::addmm"}, contraction_onto_self({{"mk", "kn"}, "mn"}));
  table.add_operators({"aten::baddbmm"}, contraction_onto_self({{"bmk", "bkn"}, "bmn"}));
  table.add_operators({"aten::linear"}, linear_layer);
  table.add_operators({"aten::_scaled_mm"}, scaled_mm);
  table.add_operators({"aten::_grouped_mm"}, grouped_mm);
}

}  // namespace funcol::matrix_rules
