#include "program.h"

namespace starquill {

bool Program::owns(const void* at) const {
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  auto next = owned_.upper_bound(address);
  if (next == owned_.begin()) return false;
  --next;
  return address < next->first + static_cast<uintptr_t>(next->second);
}

void Program::refuse(const std::string& why) {
  if (refusal_.empty()) refusal_ = why;
}

void Program::check(const Operands& operands) {
  for (const void* at : operands.reads)
    if (!owns(at)) refuse("an operation takes what was not made by one of the step's");
  for (const void* at : operands.writes)
    if (!owns(at)) refuse("an operation writes to memory that is not the step's");
}

void Program::add(const Operands& operands, Operation operation) {
  check(operands);
  items_.push_back({{}, std::move(operation)});
}

void Program::add(const Operands& operands, const Affine& weight, const Product& product) {
  check(operands);
  if (!items_.empty() && !items_.back().products.empty()) {
    const Multiplication& last = items_.back().products.front();
    const bool same = last.product.x == product.x && last.product.x_rows == product.x_rows &&
                      last.weight.width == weight.width && last.weight.bits == weight.bits &&
                      last.weight.group == weight.group;
    if (same) return items_.back().products.push_back({weight, product});
  }
  items_.push_back({{{weight, product}}, {}});
}

void Program::run(int threads) const {
  for (const Item& item : items_)
    item.products.empty() ? item.operation(threads) : affine_together(item.products, threads);
}

}  // namespace starquill
