#include "layout/placement.h"

#include <array>
#include <charconv>
#include <cmath>
#include <stdexcept>
#include <utility>

namespace funcol {
namespace {

constexpr std::array<std::string_view, 8> kPartialOps{"sum",     "avg",  "min", "max",
                                                      "product", "band", "bor", "bxor"};

std::string_view trimmed(std::string_view text) {
  const auto begin = text.find_first_not_of(" \t");
  const auto end = text.find_last_not_of(" \t");
  return begin == std::string_view::npos ? std::string_view() : text.substr(begin, end - begin + 1);
}

[[noreturn]] void refuse_word(std::string_view word) {
  throw std::invalid_argument(
      "'" + std::string(word) +
      "' is not a placement. Write R, S(dim), _S(dim, split_factor) or P(op), separated by "
      "commas, one for each mesh axis: \"S0,R\".");
}

// Returns the argument of "S(0)" or "S0": the text after the letters, without parentheses.
std::string_view argument(std::string_view word, size_t letters) {
  std::string_view rest = word.substr(letters);
  if (!rest.empty() && rest.front() == '(') {
    if (rest.back() != ')') {
      refuse_word(word);
    }
    rest = rest.substr(1, rest.size() - 2);
  }
  return trimmed(rest);
}

int64_t number(std::string_view text, std::string_view word) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) {
    refuse_word(word);
  }
  return value;
}

Placement parse_strided(std::string_view word) {
  const auto numbers = argument(word, 2);
  const auto comma = numbers.find(',');
  if (comma == std::string_view::npos) {
    refuse_word(word);
  }
  return Placement::shard(number(trimmed(numbers.substr(0, comma)), word),
                          number(trimmed(numbers.substr(comma + 1)), word));
}

Placement parse_placement(std::string_view word) {
  if (word == "R") {
    return Placement::replicate();
  }
  if (word.starts_with("_S")) {
    return parse_strided(word);
  }
  if (word.starts_with('S')) {
    return Placement::shard(number(argument(word, 1), word));
  }
  if (word.starts_with('P')) {
    const auto op = argument(word, 1);
    return Placement::partial(op.empty() ? PartialOp::kSum : partial_op(op));
  }
  refuse_word(word);
}

// Returns the position of the first comma from `begin` on outside parentheses, or the end of the text.
size_t next_comma(std::string_view text, size_t begin) {
  int depth = 0;
  for (size_t i = begin; i < text.size(); ++i) {
    depth += text[i] == '(' ? 1 : text[i] == ')' ? -1 : 0;
    if (text[i] == ',' && depth == 0) {
      return i;
    }
  }
  return text.size();
}

// Returns `value` as Python prints a float.
std::string float_text(double value) {
  constexpr double kLeastFixed = 1e-4;
  constexpr double kLeastScientific = 1e16;
  const double size = std::abs(value);
  const bool is_fixed = kLeastFixed <= size && size < kLeastScientific;
  std::array<char, 32> text{};
  const auto [end, error] =
      std::to_chars(text.data(), text.data() + text.size(), value,
                    is_fixed ? std::chars_format::fixed : std::chars_format::scientific);
  const std::string_view written(text.data(), static_cast<size_t>(end - text.data()));
  return std::string(written) + (is_fixed && written.find('.') == std::string_view::npos ? ".0" : "");
}

std::string to_string(const NormOrder& order) {
  return order.is_integer ? std::to_string(static_cast<int64_t>(order.value)) : float_text(order.value);
}

}  // namespace

bool commute(PartialOp a, PartialOp b) {
  const auto linear = [](PartialOp op) { return op == PartialOp::kSum || op == PartialOp::kAvg; };
  return a == b || (linear(a) && linear(b));
}

bool commute(const Placement& a, const Placement& b) { return commute(a.op, b.op) && a.norm == b.norm; }

std::string_view to_string(PartialOp op) { return kPartialOps.at(static_cast<size_t>(op)); }

PartialOp partial_op(std::string_view name) {
  std::string names;
  for (size_t i = 0; i < kPartialOps.size(); ++i) {
    if (kPartialOps.at(i) == name) {
      return static_cast<PartialOp>(i);
    }
    names += (names.empty() ? "" : ", ") + std::string(kPartialOps.at(i));
  }
  throw std::invalid_argument("Partial: '" + std::string(name) + "' is not a reduction. Expected one of " +
                              names + ".");
}

std::string to_string(const Placement& placement) {
  switch (placement.kind) {
    case PlacementKind::kReplicate:
      return "R";
    case PlacementKind::kShard:
      return placement.split_factor == 1 ? "S(" + std::to_string(placement.dim) + ")"
                                         : "_S(" + std::to_string(placement.dim) + ", " +
                                               std::to_string(placement.split_factor) + ")";
    case PlacementKind::kPartial:
      if (placement.is_norm()) {
        return "_NormP(" + to_string(placement.norm) + ")";
      }
      return (placement.mask != 0 ? "MaskP(" : "P(") + std::string(to_string(placement.op)) + ")";
  }
  throw std::logic_error("Placement: unknown kind");
}

std::vector<Placement> parse_placements(std::string_view text) {
  std::vector<Placement> placements;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = next_comma(text, begin);
    placements.push_back(parse_placement(trimmed(text.substr(begin, comma - begin))));
    begin = comma + 1;
  }
  return placements;
}

}  // namespace funcol
