// Runs a fuzzer's function on the kept inputs in the folders that are its arguments: a test where there is no
// libFuzzer.
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int num_arguments, char** arguments) {
  size_t num_inputs = 0;
  for (int i = 1; i < num_arguments; ++i) {
    for (const auto& entry : std::filesystem::directory_iterator(arguments[i])) {
      std::ifstream file(entry.path(), std::ios::binary);
      const std::vector<char> input{std::istreambuf_iterator<char>(file), {}};
      const std::vector<uint8_t> bytes(input.begin(), input.end());
      LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
      ++num_inputs;
    }
  }
  std::cout << num_inputs << " inputs\n";
  return num_inputs > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
