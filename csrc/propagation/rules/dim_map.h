// Where the dims of a tensor go in what an operator makes of it.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "propagation/rules/rows.h"

namespace funcol {

// For each dim of a call's first tensor its dim in the result; nothing for one that cannot stay cut.
using DimMap = std::vector<std::optional<int64_t>>;

DimMap same_dims(int64_t num_dims);
// All dims but `removed`, closing up.
DimMap without_dims(int64_t num_dims, const std::vector<int64_t>& removed);
// All dims where they are, those in `whole` not cut.
DimMap whole_dims(int64_t num_dims, const std::vector<int64_t>& whole);

// The dims of the call's first tensor that an argument names, counted from 0.
std::vector<int64_t> dims_argument(const OpCall& call, std::string_view name);

// A row for each dim of the call's only tensor that may be cut, all outputs placed alike.
void add_mapped_dims(RowList& rows, const DimMap& map);
// A row for each such dim that all of the call's tensors have, as long as the first: all placed alike.
void add_dims_alike(const OpCall& call, RowList& rows, const DimMap& map);

}  // namespace funcol
