// The number of entries of each table about DTensors that lives as long as the process, to see that none
// grows without bound.
#pragma once

#include <cstddef>
#include <map>
#include <string>

namespace funcol::python {

// By the table's name, such as "decisions". Needs the GIL.
std::map<std::string, size_t> table_sizes();

}  // namespace funcol::python
