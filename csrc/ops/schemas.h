// All operators of funcol.
#pragma once

namespace funcol {

// Defines the operators at the first call. Their kernels are registered in the files of their collectives, by
// name.
void define_operators();

}  // namespace funcol
