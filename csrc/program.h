// A step's operations, written down while they run, to be run again without Python between them.
#pragma once

#include <functional>
#include <initializer_list>
#include <map>
#include <string>
#include <vector>

#include "ops.h"

namespace starquill {

// The values that an operation takes from others and makes; weights and caches are not among them.
struct Operands {
  std::initializer_list<const void*> reads;
  std::initializer_list<const void*> writes;
};

class Program {
 public:
  using Operation = std::function<void(int threads)>;

  // Memory that holds what enters the step, or is kept for what operations make.
  void own(const void* begin, int64_t bytes) { owned_[reinterpret_cast<uintptr_t>(begin)] = bytes; }
  // A step with an operand elsewhere was not written down whole, and can't be run again.
  void add(const Operands& operands, Operation operation);
  // Products of the same rows are made together: one rounding of these, one loop for all.
  void add(const Operands& operands, const Affine& weight, const Product& product);
  void refuse(const std::string& why);
  const std::string& refusal() const { return refusal_; }

  void run(int threads) const;

 private:
  struct Item {
    std::vector<Multiplication> products;  // or none, and
    Operation operation;
  };

  void check(const Operands& operands);
  bool owns(const void* at) const;

  std::map<uintptr_t, int64_t> owned_;
  std::vector<Item> items_;
  std::string refusal_;
};

}  // namespace starquill
