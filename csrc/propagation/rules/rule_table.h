// The table of rules that find_rule() reads, and the functions that fill it, one for each family.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>

#include "propagation/rule.h"

namespace funcol {

// A hash with which maps find names without copying them.
struct NameHash {
  using is_transparent = void;
  size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
};
template <typename T>
using ByName = std::unordered_map<std::string, T, NameHash, std::equal_to<>>;

// Rules by names: "aten::add.Tensor" is the overload Tensor of the operator "aten::add".
class RuleTable {
 public:
  // Adds a rule of all overloads of these operators, and of their in-place, out= and _foreach_ forms.
  void add_operators(std::initializer_list<std::string_view> operators, const Rule& rule);
  // Adds a rule of these overloads alone.
  void add_overloads(std::initializer_list<std::string_view> overloads, const Rule& rule);

  const Rule* find(std::string_view op) const;
  std::vector<std::string> names() const;

 private:
  ByName<Rule> overloads_;
  ByName<Rule> operators_;
};

// Each family adds its rules in a namespace of its own.
namespace pointwise_rules {
void add(RuleTable& table);
}
namespace copy_rules {
void add(RuleTable& table);
}
namespace matrix_rules {
void add(RuleTable& table);
}
namespace reshape_rules {
void add(RuleTable& table);
}
namespace view_rules {
void add(RuleTable& table);
}
namespace reduction_rules {
void add(RuleTable& table);
}
namespace scan_rules {
void add(RuleTable& table);
}
namespace loss_rules {
void add(RuleTable& table);
}
namespace embedding_rules {
void add(RuleTable& table);
}
namespace indexing_rules {
void add(RuleTable& table);
}
namespace joining_rules {
void add(RuleTable& table);
}
namespace attention_rules {
void add(RuleTable& table);
}
namespace convolution_rules {
void add(RuleTable& table);
}
namespace pooling_rules {
void add(RuleTable& table);
}
namespace linear_algebra_rules {
void add(RuleTable& table);
}
namespace random_rules {
void add(RuleTable& table);
}
namespace normalization_rules {
void add(RuleTable& table);
}

}  // namespace funcol
