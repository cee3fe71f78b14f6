// The compositions of the rows of a call, and whether each is legal (composition_search.h defines both).
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "propagation/composition_search.h"
#include "propagation/row_search.h"

namespace funcol {

class Compositions {
 public:
  // Inputs with equal metadata, layouts and placements in every row, which are priced once.
  struct Group {
    size_t first;  // one of the inputs
    int64_t num_inputs;
  };
  // The mesh axes in the order in which they cut the dims of all tensors of a composition.
  using Precedence = std::vector<int64_t>;

  // Keeps references to all arguments, which must outlive this.
  Compositions(const OpCall& call, const Rows& rows, const Mesh& mesh, const std::vector<Operand>& operands,
               const std::vector<std::optional<Layout>>& required);

  const OpCall& call() const { return call_; }
  const Mesh& mesh() const { return mesh_; }
  const Layout& source(size_t input) const { return operands_[input].source; }
  bool is_pinned(size_t input) const { return operands_[input].is_pinned; }

  const Row& row(RowNumber number) const { return *rows_[number]; }
  RowNumber num_rows() const { return static_cast<RowNumber>(rows_.size()); }
  const std::vector<Precedence>& precedences() const { return precedences_; }
  const std::vector<Group>& groups() const { return groups_; }
  size_t group_of(size_t input) const { return group_of_[input]; }

  // Implements the space of row_search.h.
  size_t num_axes() const { return mesh_.sizes.size(); }
  size_t num_orders() const { return precedences_.size(); }
  const std::vector<RowNumber>& rows_of(size_t axis) const { return rows_of_[axis]; }
  bool may_follow(RowNumbers rows, RowNumber next) const;

  Composition composition(RowNumbers rows, const Precedence& precedence) const;
  // Returns true if a composition, whose rows may follow each other, is legal.
  bool is_legal(const Composition& composition) const;

  // Returns true if any input moves.
  bool moves(const Composition& composition) const;

  // Returns the first legal composition that moves no input.
  std::optional<Composition> unmoved() const;

  // Returns true if a legal composition has the placements of `wanted`, in any shard order. All masks count
  // as equal.
  bool contains(const Composition& wanted) const;

 private:
  void check_numbers() const;
  void add_rows(const std::vector<Row>& rows);
  void add_row(const Row& row, const std::vector<int64_t>& split_factors);
  void add_masked(const Row& row);
  bool has_all_dims(const Row& row) const;
  bool is_allowed(const Row& row, int64_t axis) const;
  // Returns true if two axes may have these rows. `has_single_rank` is true if one of the axes has one rank.
  bool mix(RowNumber a, RowNumber b, bool has_single_rank) const;
  void find_precedences();
  void find_groups();

  const OpCall& call_;
  const Rows& given_;
  const Mesh& mesh_;
  const std::vector<Operand>& operands_;
  const std::vector<std::optional<Layout>>& required_;
  std::deque<Row> made_;  // rows of Replicates, strided shards and masks, which the rule did not list
  std::vector<const Row*> rows_;
  std::vector<std::vector<RowNumber>> rows_of_;
  std::vector<bool> has_partials_;  // by row
  std::vector<Precedence> precedences_;
  std::vector<Group> groups_;
  std::vector<size_t> group_of_;
};

// Returns true if the axes cut every dim of `layout` in this order.
bool is_cut_by(const Layout& layout, const Compositions::Precedence& precedence);

}  // namespace funcol
