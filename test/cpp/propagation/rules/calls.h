// A short notation for calls of operators, and texts of their rows.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "propagation/rule.h"

namespace funcol::test {

using Shape = std::vector<int64_t>;
using Texts = std::vector<std::string>;

// A contiguous tensor.
inline TensorMeta tensor(std::vector<int64_t> shape, Dtype dtype = Dtype::kFloat32) {
  std::vector<int64_t> stride(shape.size(), 1);
  for (size_t dim = shape.size(); dim-- > 1;) {
    stride[dim - 1] = stride[dim] * std::max<int64_t>(shape[dim], 1);
  }
  return {std::move(shape), std::move(stride), dtype};
}

inline Argument integers(const std::vector<int64_t>& values) {
  Argument::List list;
  for (const int64_t value : values) {
    list.emplace_back().value = value;
  }
  return {list};
}

// Builds a call argument by argument.
class CallOf {
 public:
  explicit CallOf(std::string op) { call_.op = std::move(op); }

  CallOf& with(const std::string& name, const TensorMeta& meta) {
    call_.args.emplace_back(name, Argument{TensorNumber{call_.tensors.size()}});
    call_.tensors.push_back(meta);
    return *this;
  }
  CallOf& with_list(const std::string& name, const std::vector<std::optional<TensorMeta>>& metas) {
    Argument::List list;
    for (const auto& meta : metas) {
      list.push_back(meta ? Argument{TensorNumber{call_.tensors.size()}} : Argument{});
      if (meta) {
        call_.tensors.push_back(*meta);
      }
    }
    call_.args.emplace_back(name, Argument{list});
    return *this;
  }
  CallOf& with(const std::string& name, Argument argument) {
    call_.args.emplace_back(name, std::move(argument));
    return *this;
  }
  CallOf& with(const std::string& name, int64_t value) { return with(name, Argument{value}); }
  CallOf& with(const std::string& name, bool value) { return with(name, Argument{value}); }
  CallOf& with_none(const std::string& name) { return with(name, Argument{}); }

  OpCall gives(std::vector<std::optional<TensorMeta>> outputs) {
    call_.outputs = std::move(outputs);
    return call_;
  }
  OpCall gives(std::vector<int64_t> shape) { return gives({tensor(std::move(shape))}); }

 private:
  OpCall call_;
};

inline Rows rows_of(const OpCall& call) {
  const auto* rule = find_rule(call.op);
  if (rule == nullptr) {
    throw std::logic_error(call.op + " has no rule");
  }
  return (*rule)(call);
}

inline std::string to_text(const Placement& placement) {
  return placement.is_shard() && placement.split_factor == kAnySplit ? "S" + std::to_string(placement.dim)
                                                                     : to_string(placement);
}

// "S0 <- S0 R": outputs, then inputs; "-" for an output that is not returned.
inline std::string to_text(const Row& row) {
  std::string text;
  for (const auto& output : row.outputs) {
    text += (output ? to_text(*output) : "-") + " ";
  }
  text += "<-";
  for (const auto& input : row.inputs) {
    text += " " + to_text(input);
  }
  return text;
}

inline std::vector<std::string> texts_of(const OpCall& call) {
  std::vector<std::string> texts;
  for (const auto& row : rows_of(call).rows) {
    texts.push_back(to_text(row));
  }
  return texts;
}

inline bool has_row(const OpCall& call, const std::string& text) {
  const auto texts = texts_of(call);
  return std::ranges::find(texts, text) != texts.end();
}

// The rows without partials.
inline std::vector<std::string> shard_rows_of(const OpCall& call) {
  auto texts = texts_of(call);
  std::erase_if(texts, [](const std::string& text) { return text.find('P') != std::string::npos; });
  return texts;
}

// Returns true if the placements of outputs and inputs, given per axis, are legal for a call.
inline bool is_legal(const OpCall& call, const std::vector<std::string>& outputs,
                     const std::vector<std::string>& inputs, const Mesh& mesh) {
  const auto layout = [&](const std::string& text, const TensorMeta& meta) {
    return make_layout("test", parse_placements(text), {}, mesh, meta.num_dims());
  };
  Composition composition;
  for (size_t i = 0; i < outputs.size(); ++i) {
    composition.outputs.push_back(call.outputs[i] ? std::optional(layout(outputs[i], *call.outputs[i]))
                                                  : std::nullopt);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    composition.inputs.push_back(layout(inputs[i], call.tensors[i]));
  }
  const auto rows = rows_of(call);
  return rows.is_legal == nullptr || rows.is_legal(call, composition, mesh);
}

}  // namespace funcol::test
